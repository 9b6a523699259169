"""tplayout: a KV-cache store whose layout does not depend on the tensor-parallel size.

The package holds the format and its maths, storage, the cache and the command line; no engine is imported here.
"""

__version__ = "0.1.0"

"""The cache without an engine: which chunks of a prefix are stored, putting one from any sharding, getting it in any.

Imports storage and format only; numpy, torch and fsspec are imported by the calls that need them.
"""

from tplayout.cache.cache import Cache
from tplayout.cache.namespace import check_document, check_namespace
from tplayout.cache.prefix import Prefix

__all__ = ["Cache", "Prefix", "check_document", "check_namespace"]

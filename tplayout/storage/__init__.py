"""Storage: whole immutable objects by name, over local disk, S3 and any fsspec URL.

Layer: above format, below the cache; imports neither an engine nor torch. base.py is the contract, url.py the way
in; the backends are imported when a URL asks for them.
"""

from tplayout.storage.base import ObjectInfo, Store
from tplayout.storage.url import open_store, redact

__all__ = ["ObjectInfo", "Store", "open_store", "redact"]

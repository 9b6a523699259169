"""tplayout: a KV-cache store whose layout does not depend on the tensor-parallel size.

The package holds the format and its maths, storage, the cache and the command line; no engine is imported here.
The names below are the Python API; each is imported from its module when it is first used, so that importing the
package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tplayout.cache import Cache, Prefix
    from tplayout.errors import (
        ConfigError,
        FormatError,
        GeometryError,
        NamespaceMismatch,
        NotFound,
        Reason,
        StorageError,
        StorageErrorKind,
        TPLayoutError,
    )
    from tplayout.format.geometry import Geometry, Group, Part
    from tplayout.format.identity import Identity
    from tplayout.format.keys import ChunkId, prefix_extras
    from tplayout.format.sharding import Shard, shard_of, whole, writes
    from tplayout.model import describe_model
    from tplayout.storage.url import open_store

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "ChunkId",
    "ConfigError",
    "FormatError",
    "Geometry",
    "GeometryError",
    "Group",
    "Identity",
    "NamespaceMismatch",
    "NotFound",
    "Part",
    "Prefix",
    "Reason",
    "Shard",
    "StorageError",
    "StorageErrorKind",
    "TPLayoutError",
    "describe_model",
    "open_store",
    "prefix_extras",
    "shard_of",
    "whole",
    "writes",
]

_HOMES = {
    "tplayout.cache": ("Cache", "Prefix"),
    "tplayout.format.geometry": ("Geometry", "Group", "Part"),
    "tplayout.format.identity": ("Identity",),
    "tplayout.format.keys": ("ChunkId", "prefix_extras"),
    "tplayout.format.sharding": ("Shard", "shard_of", "whole", "writes"),
    "tplayout.model": ("describe_model",),
    "tplayout.storage.url": ("open_store",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF.get(name, "tplayout.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

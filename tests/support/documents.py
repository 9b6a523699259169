"""What namespace.json holds, from plain values."""

from collections.abc import Mapping
from typing import Any

from tplayout.format.identity import Identity, NamespaceDocument, StorageFacts


def namespace_document(identity: Identity, storage: Mapping[str, Any], model: str) -> bytes:
    """Bytes of namespace.json. storage: the fields of `StorageFacts`."""
    return NamespaceDocument(identity, StorageFacts(**storage), model).to_bytes()

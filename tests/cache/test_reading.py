"""Reading leaves a store as it is, damaged objects included."""

from typing import Any

import pytest

from tplayout.cache import Cache
from tplayout.errors import FormatError
from tplayout.format.identity import Identity
from tplayout.storage.base import Store


def snapshot(store: Store) -> dict[str, tuple[Any, bytes]]:
    return {info.key: (info.modified, store.get(info.key)) for info in store.list()}


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty", "foreign"])
def test_nothing_is_deleted_or_altered(store: Store, one_group: Identity, kit: Any, damage: str) -> None:
    """[M34]"""
    writer = Cache.open(store, one_group)
    kit.fill(writer, 2)
    chunk = writer.chunks(kit.TOKENS)[0]
    (name,) = (info.key for info in store.list() if chunk.key.hex() in info.key)
    data = store.get(name)
    middle = len(data) - 4096
    broken = {
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "short": data[:middle],
        "long": data + b"\0",
        "empty": b"",
        "foreign": b"no safetensors at all",
    }
    store.put(name, broken[damage])
    before = snapshot(store)
    reader = Cache.open(store, one_group)
    assert reader.longest_prefix(kit.TOKENS, verify=True).tokens == 0
    if damage != "long":  # a ranged read of the cells does not see what is behind them
        with pytest.raises(FormatError):
            reader.get(chunk)
    reader.get(writer.chunks(kit.TOKENS)[1])
    assert snapshot(store) == before

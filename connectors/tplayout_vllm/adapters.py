"""Names LoRA adapters by what they are: a digest of their files, not their name, number or path.

Layer: scheduler side; reads adapter directories, knows vLLM's request only by its fields.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

# What vLLM looks for, in this order.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_CONFIG = "adapter_config.json"
# Where an adapter comes from and how it was trained changes no KV.
_PROVENANCE = {"base_model_name_or_path", "revision", "peft_version", "inference_mode", "task_type", "lora_dropout"}
_CONTEXT = "tplayout 1 lora adapter"

_Stamp = tuple[tuple[str, int, int], ...]


class Adapters:
    """Digests of the adapters seen so far.

    The engine loads an adapter once and may load it again later, after its files have changed; which of the two it
    then uses cannot be told from here. So an adapter whose files change is not keyed any more.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[_Stamp, bytes]] = {}

    def digest(self, lora: Any) -> bytes | None:
        """32 bytes for a vLLM LoRARequest, or None when its content cannot be named."""
        if getattr(lora, "tensorizer_config_dict", None):
            return None
        try:
            files = _files(Path(lora.lora_path).expanduser())
            stamp = tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
            known = self._seen.get(lora.lora_int_id)
            if known is None or (known[0] != stamp and getattr(lora, "load_inplace", False)):
                known = self._seen[lora.lora_int_id] = (stamp, _content(files, lora))
        except (OSError, ValueError, RuntimeError):  # RuntimeError: nested too deep, "~" of nobody
            return None
        return known[1] if known[0] == stamp else None

    def seen(self, lora: Any) -> bytes:
        """The digest that was given last for the adapter of that number. KeyError if there was none."""
        return self._seen[lora.lora_int_id][1]


def _files(directory: Path) -> list[Path]:
    weights = next((directory / name for name in _WEIGHTS if (directory / name).is_file()), None)
    if weights is None:
        raise FileNotFoundError(directory)
    return [directory / _CONFIG, weights]


def _content(files: list[Path], lora: Any) -> bytes:
    config = json.loads(files[0].read_bytes())
    if not isinstance(config, dict):
        raise ValueError(f"{files[0]} is not a JSON object")
    kept = {name: value for name, value in config.items() if name not in _PROVENANCE}
    text = json.dumps(kept, sort_keys=True).encode()
    shape = b"3d" if getattr(lora, "is_3d_lora_weight", False) else b"2d"
    hasher = blake3(derive_key_context=_CONTEXT)
    hasher.update(len(text).to_bytes(8, "little") + text + shape + files[1].suffix.encode())
    with files[1].open("rb") as weights:
        while block := weights.read(2**24):
            hasher.update(block)
    return hasher.digest()

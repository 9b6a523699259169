"""What tools/peer_files.py wrote to tests/data/peers, and the model that it is of."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity

PEERS = Path(__file__).resolve().parent.parent / "data" / "peers"
GROUP = Group("full", "full", (0, 1), 4, (Part("k", 8), Part("v", 8)), "F16")
IDENTITY = Identity("files:01", {}, "float16", None, Geometry(16, (GROUP,)))
PROMPT = [int(number) for number in re.findall(r"\d+", (PEERS / "README").read_text().partition("Prompt:")[2])]


def values() -> np.ndarray[Any, Any]:
    """[head, layer, part, token, dim] as bits."""
    kv = np.load(PEERS / "values.npy", allow_pickle=False)
    return np.ascontiguousarray(kv.transpose(3, 0, 1, 2, 4)).view("u2")


def filled(source: Any, tokens: range, group: Group = GROUP) -> np.ndarray[Any, Any]:
    """What a source gives for these tokens."""
    out = np.zeros((group.heads, len(group.layers), *group.cell_shape(len(tokens))), "u2")
    assert source.fill(0, tokens, out)
    return out

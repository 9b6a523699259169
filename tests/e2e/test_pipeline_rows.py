"""Pipeline stages: which rank holds which layers makes no difference to what is stored."""

from pathlib import Path

import pytest
from e2e_pairs import Relay, Server
from e2e_plain import PlainEngines

STAGES = "Pipeline parallel"
SIX = Relay("llama-6layers")


@pytest.mark.row(STAGES, "PP 2 → 1, uneven stages")
def test_two_stages_to_one(tmp_path: Path, plain: PlainEngines) -> None:
    SIX.run(tmp_path, plain, [Server(pp=2, layers="4,2"), Server(block=128)])


@pytest.mark.slow
@pytest.mark.row(STAGES, "PP 1 → 2 (also uneven); PP 2 × TP 2 → TP 4, TP 1; TP 4 → PP 2 × TP 2")
def test_stages_and_ranks(tmp_path: Path, plain: PlainEngines) -> None:
    servers = [
        Server(tp=2, pp=2),
        Server(tp=4, block=32),
        Server(tp=1, block=128),
        Server(pp=2),
        Server(pp=2, layers="1,5", block=32),
        Server(tp=2, pp=2, layers="4,2"),
    ]
    SIX.run(tmp_path, plain, servers)

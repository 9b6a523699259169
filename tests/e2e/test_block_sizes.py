"""Block sizes meet chunk sizes: what an engine with one block size wrote is read by one with another.

Also where neither divides the other: a chunk then ends inside a block, and a loaded prefix too.
"""

from pathlib import Path

import pytest
from e2e_chain import Chain, References
from e2e_one_process import OneProcess

BLOCKS = (32, 64, 128, 256, 96, 32)  # each reads what the one before it wrote


@pytest.fixture(scope="module")
def references(one_process: OneProcess) -> References:
    found = References(one_process)
    found.learn(range(1, len(BLOCKS) + 1))
    return found


def case(chunk: int, *blocks: int, slow: bool = True) -> object:
    """A chunk size and the block sizes of the engines, in their order."""
    row = pytest.mark.row("Block sizes and chunk sizes", f"chunks of {chunk}: blocks of {' → '.join(map(str, blocks))}")
    return pytest.param(chunk, blocks, id=f"chunk{chunk}", marks=[row, pytest.mark.slow] if slow else [row])


@pytest.mark.parametrize(
    ("chunk", "blocks"),
    [
        case(80, 32, 96, slow=False),
        case(256, 256, 96, slow=False),
        case(64, *BLOCKS),
        case(512, *BLOCKS),
    ],
)
def test_chain(
    one_process: OneProcess, references: References, tmp_path: Path, chunk: int, blocks: tuple[int, ...]
) -> None:
    chain = Chain(tmp_path / "store", chunk, references)
    for block in blocks:
        chain.turn(one_process.offloading(chain.root, options={"chunk_tokens": chunk}, block_size=block))
    chain.check()


@pytest.mark.slow
@pytest.mark.row("Block sizes and chunk sizes", f"chunks of 256: blocks of {' → '.join(map(str, BLOCKS))}")
def test_the_default_chunk(one_process: OneProcess, references: References, tmp_path: Path) -> None:
    chain = Chain(tmp_path / "store", 256, references)
    for block in BLOCKS:
        chain.turn(one_process.offloading(chain.root, block_size=block))
    chain.check()

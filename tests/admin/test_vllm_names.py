"""Block hashes equal those that vLLM computes."""

import random

import pytest

from tplayout.admin.vllm_names import ALGORITHMS, block_hashes
from tplayout.errors import ConfigError

# tokens 0, 300, 70000, 2**31-1 and 5 in blocks of 5 and 2; computed by vLLM 0.32.0, seed 77 for xxhash
TOKENS = [0, 300, 70000, 2**31 - 1, 5]
KNOWN = {
    "sha256": (
        [
            "b1b0bee6f21f626abeb328f5797cc9c06b89fc02ab7b8384b4feffcd5d1539d2",
            "9cd18dd633bb30feb15220a5d7bb02f3bfd38c3cf6f6b58a886742e2d617c023",
        ],
        ["decd9ff3911560f9ceafbaac2cc7f2b082f7396fa1df114e9d070932b132d3f4"],
    ),
    "sha256_cbor": (
        [
            "faf516273d1ec8ca0792d2839a6b60034405e186b91004ffe277fb872012c4cd",
            "6d6bcbfebf3097d5cdefb1b9e2c788da28a4c7b0a1b97c7d9f21e0d9cdab3af4",
        ],
        ["07e0b74112798f9b196fe28df670f549f18e9e4ecfd12cc5a83a55608910c476"],
    ),
    "xxhash": (
        ["587cd700dc2770593c7531ea59745ed3", "c43f1fc686cfb01c37f27882e453d489"],
        ["69ed2636b1b288df58a4ed76d488a417"],
    ),
    "xxhash_cbor": (
        ["dcafb31c19947f74d2c46d5a11af174a", "be74b7805fe27fc2346df381d729f6ce"],
        ["4f72f9dd63bbde83041cac7777b65eea"],
    ),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_known_hashes(algorithm):
    seed = "77" if algorithm.startswith("xxhash") else None
    assert [h.hex() for h in block_hashes(TOKENS, 2, algorithm, seed)] == KNOWN[algorithm][0]
    assert [h.hex() for h in block_hashes(TOKENS, 5, algorithm, seed)] == KNOWN[algorithm][1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 16, 1024])
def test_random_prompts_against_vllm(monkeypatch, algorithm, size):
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils

    seed = "a seed" if algorithm.startswith("xxhash") else None
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    function = hashing.get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    draw = random.Random(size)
    tokens = [draw.randrange(draw.choice([24, 256, 65536, 2**31])) for _ in range(3 * size)]
    parent, expected = None, []
    for start in range(0, 3 * size, size):
        parent = kv_cache_utils.hash_block_tokens(function, parent, tokens[start : start + size], None)
        expected.append(parent)
    assert block_hashes(tokens, size, algorithm, seed) == expected


def test_wrong_statements_are_named():
    with pytest.raises(ConfigError, match="unknown"):
        block_hashes(TOKENS, 2, "md5")
    with pytest.raises(ConfigError, match="--hash-seed"):
        block_hashes(TOKENS, 2, "xxhash")

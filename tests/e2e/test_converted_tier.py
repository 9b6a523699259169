"""A cache that vLLM's file-system tier wrote at TP=2, converted and served by a vLLM at TP=1 with the connector.

The KV is known: it is what Hugging Face transformers computes. vLLM's own code lays it out and writes the files.
"""

import json
from pathlib import Path

import demo_models
import numpy as np
import peer_files
import pytest
from click.testing import CliRunner
from e2e_cases import CHUNK, assert_same, cold_answer, engine_args, external_hits, noise, offload
from e2e_store import stored_prefix, verified
from test_oracle import transformers_kv
from vllm_engine import engine

from tplayout.cli.main import main

FULL = 3 * CHUNK
TP, BLOCK, BLOCKS_PER_FILE = 2, 64, 2


def known(model: Path, tokens: list[int]) -> peer_files.Known:
    """What transformers computes, [layer, part, token, head, dim]."""
    kv = transformers_kv(str(model), tokens)  # [layer, head, part, token, dim]
    return peer_files.Known(tokens, np.ascontiguousarray(kv.permute(0, 2, 3, 1, 4).numpy()), BLOCK)


@pytest.mark.parametrize(
    ("layout", "canonical"),
    [("hnd", False), pytest.param("nhd", True, marks=pytest.mark.slow)],
    ids=["direct", "canonical"],
)
def test_a_converted_tier_is_served(tmp_path: Path, logs: Path, layout: str, canonical: bool) -> None:
    model, tokens = demo_models.ensure("llama"), noise(FULL + 21, 61)
    tier, store, ids = tmp_path / "tier", tmp_path / "store", tmp_path / "ids.json"
    peer_files.tier(tier, TP, BLOCKS_PER_FILE, layout, canonical, canonical, known(model, tokens[:FULL]))
    ids.write_text(json.dumps(tokens))
    command = ["convert", str(tier), str(store), "--model", str(model), "--tokens", str(ids)]
    stated = ["--compute-dtype", "float32", "--engine-tp", str(TP), "--page-order", layout]
    done = CliRunner().invoke(main, command + stated)
    assert done.exit_code == 0, done.output
    assert stored_prefix(store, tokens) == FULL
    with engine(engine_args("llama", 1, **offload(f"file://{store}")), logs / f"tier-{layout}.log") as running:
        output = running.generate(tokens)
        assert output.cached == FULL
        assert external_hits(running) == FULL
        assert_same(output, cold_answer(running, tokens))
    assert len(verified(store)) == 2 * FULL // CHUNK  # what was converted, and the cold answer's own

"""vLLM's file-system tier, from files that vLLM's own code wrote: right when stated right, else refused by name."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.admin.peer_kit import GROUP, PEERS, PROMPT, filled, values
from tplayout.admin.pages import check_statement
from tplayout.admin.vllm_tier import (
    TierWriter,
    find_tiers,
    open_tier,
    read_prompt,
    rows_of,
    tier_for_tp,
    write_config,
)
from tplayout.errors import ConfigError, FormatError, GeometryError, NotFound, TPLayoutError

# directory -> TP size and page order that are stated
RIGHT = {
    "tier-tp1": (None, "hnd"),
    "tier-tp2": (None, "hnd"),
    "tier-tp2-agnostic": (2, "nhd"),
    "tier-canonical-hnd": (None, None),
    "tier-canonical-nhd": (None, None),
}


def opened(name, place=PEERS):
    (config,) = find_tiers(place / name)
    return open_tier(config)


def source_of(name, tp="right", order="right", group=GROUP, tokens=PROMPT):
    tier = opened(name)
    tp = RIGHT[name][0] if tp == "right" else tp
    order = RIGHT[name][1] if order == "right" else order
    return read_prompt(tier, rows_of(tier, group, tp, order), tokens)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_stated_right_gives_the_values(name):
    source = source_of(name)
    assert source.tokens == 32
    check_statement(source, PROMPT, "it")
    whole = values()
    assert np.array_equal(filled(source, range(32)), whole)
    assert np.array_equal(filled(source, range(5, 21)), whole[:, :, :, 5:21])  # across blocks and files


@pytest.mark.parametrize(
    ("name", "tp", "order"),
    [
        ("tier-tp2-agnostic", 1, "nhd"),
        ("tier-tp2-agnostic", 4, "nhd"),
        ("tier-tp2-agnostic", 2, "hnd"),
        ("tier-tp2-agnostic", 2, "split-nhd"),
        ("tier-tp2-agnostic", 2, "cpu"),
        ("tier-tp1", 1, "nhd"),
        ("tier-tp1", 1, "split-hnd"),
        ("tier-canonical-hnd", None, "split-hnd"),
    ],
)
def test_what_is_stated_wrong_does_not_fit_the_values(name, tp, order):
    with pytest.raises(ConfigError, match="do not fit the statement"):
        check_statement(source_of(name, tp, order), PROMPT, "the statement")


def test_other_tokens_do_not_fit_the_values():
    swapped = PROMPT[:1] + PROMPT[2:3] + PROMPT[1:2] + PROMPT[3:]
    rolled = PROMPT[1:] + PROMPT[:1]
    source = source_of("tier-tp1")
    for tokens in (rolled, sorted(swapped)):
        with pytest.raises(ConfigError, match="equal tokens must have equal V"):
            check_statement(source, tokens, "it")


def test_what_is_not_told_must_be_stated():
    for name, tp, order, flag in (
        ("tier-tp2-agnostic", None, "nhd", "--engine-tp"),
        ("tier-tp1", None, None, "--page-order"),
        ("tier-tp2", 4, "hnd", "tp_size 2, not 4"),
        ("tier-canonical-nhd", None, "hnd", "says nhd, not hnd"),
    ):
        with pytest.raises(ConfigError, match=flag):
            source_of(name, tp, order)
    with pytest.raises(ConfigError, match="unknown"):
        source_of("tier-tp1", None, "dhn")


@pytest.mark.parametrize(
    "other",
    [{"dtype": "BF16"}, {"layers": (0, 1, 2)}, {"layers": (3, 4)}, {"heads": 64}, {"heads": 3}],
    ids=["dtype", "more layers", "other layers", "more heads", "uneven heads"],
)
def test_another_model_is_refused(other):
    with pytest.raises(TPLayoutError, match=r"BF16|layers|bytes|cannot split|heads"):
        check_statement(source_of("tier-tp2", group=replace(GROUP, **other)), PROMPT, "it")


def test_prompts_that_are_not_there():
    assert source_of("tier-tp1", tokens=PROMPT[:25]).tokens == 24
    assert source_of("tier-tp1", tokens=[*PROMPT[:16], *[1] * 16]).tokens == 16
    with pytest.raises(NotFound, match="--hash-algo"):
        source_of("tier-tp1", tokens=[99] * 32)
    tier = opened("tier-tp1")
    with pytest.raises(NotFound):
        read_prompt(tier, rows_of(tier, GROUP, None, "hnd"), PROMPT, "sha256_cbor")


def test_a_prompt_without_a_repeated_token_cannot_be_checked():
    with pytest.raises(ConfigError, match="--unchecked"):
        check_statement(source_of("tier-tp1"), list(range(32)), "it")


def test_a_truncated_file_is_named(tmp_path):
    shutil.copytree(PEERS / "tier-tp1", tmp_path / "tier-tp1")
    file = next((tmp_path / "tier-tp1").rglob("*.bin"))
    file.write_bytes(file.read_bytes()[:-1])
    tier = opened("tier-tp1", tmp_path)
    with pytest.raises(FormatError, match=file.name):
        read_prompt(tier, rows_of(tier, GROUP, None, "hnd"), PROMPT)


@pytest.mark.parametrize("change", ["edited", "pp", "groups", "opaque", "text", "numbers"])
def test_tiers_that_are_not_converted_are_refused_by_name(tmp_path, change):
    fields = json.loads(next((PEERS / "tier-tp1").rglob("config.json")).read_text())
    from tplayout.admin.vllm_names import base_name

    base = base_name(fields)
    changes = {
        "edited": {"tokens_per_hash": 4},
        "pp": {"pp_size": 2},
        "groups": {"kv_cache_groups": fields["kv_cache_groups"] * 2},
        "opaque": {"canonical_format": "v1-hnd"},
        "numbers": {"tp_size": "2"},
    }
    fields |= changes.get(change, {})
    if change != "edited":
        base = base_name(fields)
    (tmp_path / base).mkdir()
    text = '{"blocks_per_file": ' if change == "text" else json.dumps(fields)
    (tmp_path / base / "config.json").write_text(text)
    with pytest.raises((ConfigError, FormatError), match=r"config\.json"):
        opened(".", tmp_path)


@pytest.mark.parametrize("name", RIGHT)
def test_written_files_are_those_that_vllm_writes(name, tmp_path):
    """From canonical KV back to the peer's bytes and names."""
    tier = replace(opened(name), root=tmp_path)
    rows = rows_of(tier, GROUP, *RIGHT[name])
    for count in (1, 0):
        writer = TierWriter(tier, rows, tier.hashes(PROMPT, "sha256", None))
        writer.take(0, range(16), values()[..., :16, :])
        writer.take(0, range(16, 32), values()[..., 16:, :])
        write_config(tier)
        files = 32 // tier.file_tokens
        assert (writer.written, writer.present) == (files * count, files * (1 - count))
    theirs = {p.relative_to(PEERS / name): p.read_bytes() for p in (PEERS / name).rglob("*") if p.is_file()}
    ours = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert ours == theirs


def test_another_tp_size_is_another_directory(tmp_path):
    tier = opened("tier-tp1")
    assert tier_for_tp(tier, tmp_path, 2).base != tier.base
    agnostic = opened("tier-tp2-agnostic")
    assert tier_for_tp(agnostic, tmp_path, 4).base == agnostic.base


def test_replicated_heads_are_written_by_every_rank(tmp_path):
    tier = tier_for_tp(opened("tier-tp1"), tmp_path, 8)
    rows = rows_of(tier, GROUP, None, "hnd")
    writer = TierWriter(tier, rows, tier.hashes(PROMPT, "sha256", None))
    writer.take(0, range(32), values())
    source = read_prompt(tier, rows, PROMPT)
    assert np.array_equal(filled(source, range(32)), values())
    assert rows.nbytes == 4096


def test_uneven_tp_sizes_are_refused(tmp_path):
    with pytest.raises(GeometryError, match="cannot split"):
        rows_of(tier_for_tp(opened("tier-tp1"), tmp_path, 3), GROUP, None, "hnd")

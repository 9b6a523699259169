"""What a worker says about a layer is right, or the layer is refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tplayout.errors import ConfigError
from tplayout_vllm.discovery import _scales, block_tables, discover_worker
from tplayout_vllm.metadata import this_machine

BLOCKS, BLOCK, HEADS, DIM = 4, 32, 2, 8
SHAPE = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}


class Backend:
    """Stores [block][part][token][head][dim], as many GPU backends do."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        parts = cache.as_strided(
            (cache.shape[0], 2, layer.tokens, HEADS, DIM),
            (cache.stride(0), layer.tokens * HEADS * DIM, HEADS * DIM, DIM, 1),
        )
        for part, values in enumerate((key, value)):
            parts[slots // layer.tokens, part, slots % layer.tokens] = values.to(cache.dtype)


class Opaque:
    """A backend that writes its pages within the attention kernel."""


def layer(tokens: int = BLOCK, dtype: torch.dtype = torch.float32, impl: Any = None, **more: Any) -> SimpleNamespace:
    cache = torch.zeros((BLOCKS * BLOCK // tokens, HEADS, tokens, 2 * DIM), dtype=dtype)
    return SimpleNamespace(
        kv_cache=cache, tokens=tokens, num_kv_heads=HEADS, head_size=DIM, impl=impl or Backend(), **more
    )


def full(**more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**SHAPE, **more})


def discover(
    layers: dict[str, SimpleNamespace],
    groups: list[tuple[list[str], Any]],
    drafts: bool = False,
    compute: torch.dtype = torch.float32,
) -> Any:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        speculative_config=object() if drafts else None,
        model_config=SimpleNamespace(dtype=compute, get_total_num_hidden_layers=lambda: 2),
    )
    kv_config = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in groups])
    return discover_worker(config, kv_config, {name: one.kv_cache for name, one in layers.items()})


def discover_one(one: SimpleNamespace, spec: Any) -> Any:
    report, (found,) = discover({"model.layers.7.attn": one}, [(["model.layers.7.attn"], spec)])
    return report.layers[0], found


def test_a_layer_is_reported_as_it_is() -> None:
    report, found = discover_one(layer(), full())
    assert (report.name, report.index, report.table, report.heads) == ("model.layers.7.attn", 7, 0, HEADS)
    assert (report.parts, report.dtype) == ((("k", DIM), ("v", DIM)), "F32")
    assert (report.window, report.latent, report.scales) == (None, False, None)
    assert found.ratio == 1
    assert [part.strides for part in found.layout.parts] == [(HEADS * DIM, DIM, 1)] * 2
    assert found.layout.parts[1].base == BLOCK * HEADS * DIM


def test_the_live_cache_is_not_touched() -> None:
    one = layer()
    one.kv_cache.fill_(7)
    discover_one(one, full())
    assert bool((one.kv_cache == 7).all())


def test_blocks_may_be_split_for_the_kernel() -> None:
    _, found = discover_one(layer(tokens=16), full())
    assert found.ratio == 2


def test_blocks_that_are_no_multiple_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer model\.layers\.7\.attn: blocks of 48 .* kernel blocks of 32"):
        discover_one(layer(), full(block_size=48))


def test_where_the_worker_runs_is_reported() -> None:
    report, _ = discover({"l.0": layer()}, [(["l.0"], full())])
    assert report.machine == this_machine()


@pytest.mark.parametrize(
    ("dtype", "stated", "name"),
    [
        (torch.float16, "auto", "F16"),
        (torch.bfloat16, "bfloat16", "BF16"),
    ],
)
def test_dtypes_are_resolved(dtype: torch.dtype, stated: str, name: str) -> None:
    report, _ = discover_one(layer(dtype=dtype, kv_cache_dtype=stated), full(dtype=dtype))
    assert report.dtype == name


@pytest.mark.parametrize(("stated", "name"), [("fp8", "F8_E4M3"), ("fp8_e4m3", "F8_E4M3"), ("fp8_e5m2", "F8_E5M2")])
def test_fp8_is_told_from_the_setting(stated: str, name: str) -> None:
    """Its pages are uint8 to torch."""

    class Fp8(Backend):
        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            kind = torch.float8_e4m3fn if name == "F8_E4M3" else torch.float8_e5m2
            scaled = ((key / 0.5).to(kind).view(torch.uint8), (value / 0.25).to(kind).view(torch.uint8))
            super().do_kv_cache_update(layer, *scaled, cache, slots)

    one = layer(dtype=torch.uint8, impl=Fp8(), kv_cache_dtype=stated, _k_scale_float=0.5, _v_scale_float=0.25)
    report, found = discover_one(one, full(dtype=torch.uint8))
    assert (report.dtype, report.scales) == (name, (0.5, 0.25))
    assert found.layout.parts[0].strides == (HEADS * DIM, DIM, 1)


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"layer model\.layers\.7\.attn: KV dtype int4_per_token_head"):
        discover_one(layer(dtype=torch.uint8, kv_cache_dtype="int4_per_token_head"), full(dtype=torch.uint8))


class Subclass(FullAttentionSpec):
    """As vLLM's specs for caches that are not plain keys and values."""


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,)), "recurrent state"),
        (CrossAttentionSpec(**SHAPE), "cross attention"),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64), "chunked local attention"),
        (full(non_causal=True), "non-causally"),
        (full(attention_chunk_size=64), "drops tokens"),
        (full(tokens_per_state=4), "4 tokens a state"),
        (Subclass(**SHAPE), r"\(Subclass\) is of a kind"),
    ],
)
def test_kinds_that_cannot_be_served_are_refused(spec: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=r"layer model\.layers\.7\.attn.*" + said):
        discover_one(layer(), spec)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (layer(impl=Opaque()), "no separate cache-update op"),
        (SimpleNamespace(kv_cache=[torch.zeros(1)], impl=Backend()), "its cache is a list"),
    ],
)
def test_layouts_that_cannot_be_discovered_are_refused_with_layer_and_backend(one: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer l\.7 \({type(one.impl).__name__}\).*{said}.*--attention-backend"):
        discover_worker(
            SimpleNamespace(
                compilation_config=SimpleNamespace(static_forward_context={"l.7": one}),
                speculative_config=None,
                model_config=SimpleNamespace(dtype=torch.float32),
            ),
            SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["l.7"], full())]),
            {"l.7": torch.zeros(1)},
        )


class Raw(Backend):
    """Stores keys and values bit by bit, whatever the dtype of the page, as vLLM's CPU op does."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        wide = torch.empty(0, dtype=key.dtype).set_(cache.untyped_storage())
        blocks = wide.numel() // cache.stride(0)
        super().do_kv_cache_update(
            layer, key, value, wide.as_strided((blocks, *cache.shape[1:]), cache.stride()), slots
        )


@pytest.mark.parametrize("compute", [torch.float32, torch.float16])
def test_pages_of_another_dtype_than_the_keys_are_refused(compute: torch.dtype) -> None:
    """vLLM lets one ask for --kv-cache-dtype bfloat16 with --dtype float32, and writes behind the page then."""
    one = layer(dtype=torch.bfloat16, impl=Raw(), kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match=rf"layer l\.7 \(Raw\): its page layout of a KV dtype other than {compute}"):
        discover({"l.7": one}, [(["l.7"], full(dtype=torch.bfloat16))], compute=compute)


@pytest.mark.parametrize("name", ["model.attn", "model.layers.1.experts.2.attn"])
def test_layers_without_one_number_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot tell its number"):
        discover({name: layer()}, [([name], full())])


def test_layers_that_use_another_s_cache_are_left_out() -> None:
    layers = {"l.0": layer(), "l.1": layer(kv_sharing_target_layer_name="l.0")}
    report, found = discover(layers, [(["l.0"], full())])
    assert [row.name for row in report.layers] == [one.name for one in found] == ["l.0"]


def test_draft_layers_are_left_out() -> None:
    """By their prefix, or numbered behind the model's own."""
    names = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn", "draft_model.model.layers.0.attn"]
    layers = {name: layer() for name in names}
    report, _ = discover(layers, [(names, full())], drafts=True)
    assert [row.index for row in report.layers] == [0, 1]


def test_windows_come_from_the_layer_where_the_table_has_full_blocks() -> None:
    """Without the hybrid allocator one spec with a window stands for layers with and without."""
    layers = {"l.0": layer(sliding_window=None), "l.1": layer(sliding_window=128)}
    report, _ = discover(layers, [(["l.0", "l.1"], full(sliding_window=128))])
    assert [row.window for row in report.layers] == [None, 128]


def test_windows_of_window_blocks() -> None:
    report, _ = discover_one(layer(), SlidingWindowSpec(**SHAPE, sliding_window=96))
    assert report.window == 96


def test_groups_of_layers_that_differ_have_a_spec_a_layer() -> None:
    specs = {"l.0": full(), "l.1": full(dtype=torch.float16)}
    layers = {"l.0": layer(), "l.1": layer(dtype=torch.float16)}
    report, _ = discover(layers, [(["l.0", "l.1"], UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs))])
    assert [row.dtype for row in report.layers] == ["F32", "F16"]


def test_tables_say_who_gives_blocks_back() -> None:
    window = SlidingWindowSpec(**SHAPE, sliding_window=96)
    uniform = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"l.3": window})
    specs = [window, full(sliding_window=96), uniform, MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1})]
    config = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec([f"l.{i}"], spec) for i, spec in enumerate(specs)])
    tables = block_tables(config, ((0,), (1,), (2,), (3,)))
    assert tables.block_sizes == (BLOCK, BLOCK, 64, BLOCK)
    assert tables.kept == {1, 3}


def scaled(k: list[float], v: list[float]) -> SimpleNamespace:
    """A layer as vLLM leaves it after loading: of scales by head, the float is only the largest."""
    scales = {"_k_scale": torch.tensor(k), "_v_scale": torch.tensor(v)}
    return SimpleNamespace(**scales, _k_scale_float=max(k), _v_scale_float=max(v))


def test_one_scale_a_part() -> None:
    assert _scales("layer", scaled([0.5], [0.25]), latent=False) == (0.5, 0.25)
    assert _scales("layer", scaled([0.5], [0.25]), latent=True) == (0.5, 0.5)


@pytest.mark.parametrize(("k", "v"), [([0.5, 0.25], [1.0]), ([1.0], [0.5, 0.25])])
def test_scales_by_head_are_refused(k: list[float], v: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"layer model\.layers\.7.*differ by head"):
        _scales("model.layers.7", scaled(k, v), latent=False)

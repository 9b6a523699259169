"""Tables and plots of docs/cost-model.md, made of the arithmetic in cost_model.py.

A table stands between two comments of the document and is rewritten there; the text around it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cost_model import (
    BLAKE3_BYTES_PER_S,
    DEFAULT,
    MODELS,
    PREFIXES,
    SERVERS,
    TP_SIZES,
    TRAFFIC,
    TUNED,
    Model,
    break_even,
    bus_seconds,
    device_seconds,
    fits,
    fleet_load,
    gets,
    launch_seconds,
    load_seconds,
    pays_from,
    permute_seconds,
    prefill_seconds,
    rank_work,
    savers,
    staging_limit,
    staging_seconds,
    token_cost,
    tokens_in_time,
)

from tplayout.format.geometry import DEFAULT_CHUNK_TOKENS
from tplayout_vllm.device import SAVE_BUFFERS

DOCS = Path(__file__).resolve().parent.parent / "docs"
DOCUMENT = DOCS / "cost-model.md"
LONGEST = PREFIXES[-1]
_PLACE = "<!-- {name}: written by tools/cost_model.py -->\n"
_END = "<!-- end -->\n"


def tables() -> dict[str, str]:
    """The document's tables in Markdown, by name."""
    return {
        "chunk": _chunk(),
        "prefix": _prefix(),
        "limits": _limits(),
        "fleet": _fleet(),
        "dollars": _dollars(),
        "assumptions": _assumptions(),
    }


def replaced(document: str, tables: Mapping[str, str]) -> str:
    """The document with the tables in their places. Raises ValueError when one has no place, or a place no table."""
    pattern = _PLACE.format(name="(?P<name>[a-z]+)") + "(?s:.*?)" + _END
    places = [match["name"] for match in re.finditer(pattern, document)]
    if sorted(places) != sorted(tables):
        raise ValueError(f"docs/cost-model.md has places for {sorted(places)}, the tables are {sorted(tables)}")
    return re.sub(pattern, lambda match: _PLACE.format(name=match["name"]) + tables[match["name"]] + _END, document)


def write() -> None:
    """Rewrite the document's tables and draw its plots. Raises ImportError without matplotlib."""
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(), tables()))
    plot_reload(DOCS / "cost-model-reload.png")
    plot_fleet(DOCS / "cost-model-fleet.png")


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _short(value: float) -> str:
    """Two significant digits, and all those before the decimal point."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value >= 0.095 else f"{value:.3f}"


def _by_tp(cell: Callable[[int], str]) -> str:
    """One cell of a table for all TP sizes."""
    cells = list(map(cell, TP_SIZES))
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)


def _chunk() -> str:
    head = ["model", "ranks that save", "MiB a rank", "copies", "MiB each", "kernels (blocks)", "with blocks of 64"]
    head += ["events", "copies of a partial chunk", "PCIe ms", "launches ms", "kernels ms"]
    return _table(head, map(_chunk_row, MODELS))


def _chunk_row(model: Model) -> list[object]:
    works = {tp: rank_work(model, tp) for tp in TP_SIZES}
    one, writing = works[1], savers(model, TP_SIZES[-1])
    return [
        model.name,
        "all" if writing == TP_SIZES[-1] else writing,
        _by_tp(lambda tp: _short(works[tp].nbytes / 2**20)),
        _by_tp(lambda tp: str(works[tp].copies)),
        _short(one.copy_bytes / 2**20),
        f"{one.kernels} (of {model.block_tokens})",
        rank_work(model, 1, 64).kernels,
        one.events,
        _by_tp(lambda tp: str(works[tp].part_copies)),
        _by_tp(lambda tp: _short(bus_seconds(works[tp], 1, DEFAULT) * 1e3)),
        _by_tp(lambda tp: _short(launch_seconds(works[tp], 1, DEFAULT) * 1e3)),
        _by_tp(lambda tp: _short(permute_seconds(works[tp], 1, DEFAULT) * 1e3)),
    ]


def _prefix() -> str:
    few, many = DEFAULT.io_processes, TUNED.io_processes
    head = ["model", "prefix", "GB", "GETs", f"staging s: {few} / {many} I/O processes", "limited by"]
    head += ["device s", "computing s", "break-even Gbit/s"]
    return _table(head, [_prefix_row(model, tokens) for model in MODELS for tokens in PREFIXES])


def _prefix_row(model: Model, tokens: int) -> list[object]:
    chunks, nbytes = tokens // DEFAULT_CHUNK_TOKENS, model.layout.nbytes
    return [
        model.name,
        f"{tokens // 1024}k",
        _short(chunks * nbytes / 1e9),
        chunks * gets(nbytes),
        " / ".join(_short(staging_seconds(model, tokens, a)) for a in (DEFAULT, TUNED)),
        " / ".join(staging_limit(model, tokens, a) for a in (DEFAULT, TUNED)),
        _by_tp(lambda tp: _short(device_seconds(rank_work(model, tp), chunks, DEFAULT))),
        _by_tp(lambda tp: _bracketed(model, tp, _short(prefill_seconds(model, tokens, tp, DEFAULT)))),
        _by_tp(lambda tp: _gigabits(break_even(model, tokens, tp, DEFAULT))),
    ]


def _bracketed(model: Model, tp: int, text: str) -> str:
    return text if fits(model, tp, DEFAULT) else f"({text})"


def _gigabits(bits: float | None) -> str:
    return "none" if bits is None else _short(bits / 1e9)


def _limits() -> str:
    few, many = DEFAULT.io_processes, TUNED.io_processes
    head = ["model", f"GB/s from S3: {few} / {many} I/O processes / {many} with keyed BLAKE3"]
    head += [f"16k reloads/s a server: {few} / {many}", f"tokens in {DEFAULT.load_deadline:.0f} s: {few} / {many}"]
    head += [f"faster than computing from, {n} I/O processes" for n in (few, many)]
    head += ["step held up, ms (128k, TP=8)", "GPU scratch, MiB (TP=8)"]
    return _table(head, map(_limits_row, MODELS))


def _limits_row(model: Model) -> list[object]:
    work, chunks = rank_work(model, TP_SIZES[-1]), LONGEST // DEFAULT_CHUNK_TOKENS
    nbytes = chunks * model.layout.nbytes
    keyed = replace(TUNED, digest=BLAKE3_BYTES_PER_S)
    rates = [nbytes / staging_seconds(model, LONGEST, a) for a in (DEFAULT, TUNED, keyed)]
    request = TRAFFIC.reloaded / LONGEST * nbytes
    return [
        model.name,
        " / ".join(_short(rate / 1e9) for rate in rates),
        " / ".join(_short(rate / request) for rate in rates[:2]),
        " / ".join(f"{tokens_in_time(model, a) // 1024}k" for a in (DEFAULT, TUNED)),
        _by_tp(lambda tp: _thousands(pays_from(model, tp, DEFAULT))),
        _by_tp(lambda tp: _thousands(pays_from(model, tp, TUNED))),
        _short(launch_seconds(work, chunks, DEFAULT) * 1e3),
        _short((SAVE_BUFFERS + 1) * work.nbytes / 2**20),
    ]


def _thousands(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens / 1024:.0f}k"


def _fleet() -> str:
    rows = []
    for servers in SERVERS:
        loads = [fleet_load(model, servers, TRAFFIC, DEFAULT) for model in MODELS]
        rows.append(
            [
                f"{servers:,}",
                f"{servers * TRAFFIC.requests:,.0f}",
                " / ".join(f"{load.gets:,.0f}" for load in loads),
                f"{loads[0].puts:,.0f}",
                " / ".join(str(load.partitions) for load in loads),
                " / ".join(_short(8 * load.nbytes / 1e9) for load in loads),
            ]
        )
    return _table(["servers", "requests/s", "GET and HEAD/s", "PUT/s", "partitions needed", "Gbit/s"], rows)


def _dollars() -> str:
    rows = []
    for model in MODELS:
        cost = token_cost(model, TRAFFIC.reloaded, DEFAULT)
        often = cost.reloads_a_month
        dollars = [f"{x:.4f}" if x < 0.1 else f"{x:.2f}" for x in (cost.reload, cost.compute, cost.store, cost.month)]
        rows.append([model.name, *dollars, _short(often), _short(30 / often)])
    head = ["model", "reloading (GETs)", "computing (GPU time)", "storing (PUT, HEAD)", "keeping a month"]
    return _table([*head, "reloads a month that pay for it", "days between reloads, at most"], rows)


_GUIDE = "AWS, *Best practices design patterns: optimizing Amazon S3 performance*"
_PATTERNS = "AWS, *Performance design patterns for Amazon S3*"


def _assumptions() -> str:
    a, t = DEFAULT, TRAFFIC
    prices = f"${a.dollars_get * 1e3:.4f} / 1,000 GET, ${a.dollars_put * 1e3:.3f} / 1,000 PUT, "
    prices += f"${a.dollars_byte_month * 1e9:.3f} / GB and month"
    rates = f"{a.gets_a_partition:,.0f} GET or HEAD/s, {a.puts_a_partition:,.0f} PUT/s, at least"
    traffic = f"{t.requests:.0f} request/s, {t.reloaded:,} tokens reloaded from S3, {t.stored:,} stored"
    rows = [
        [
            "PCIe 5 ×16, one direction",
            f"{a.pcie / 1e9:.0f} GB/s a GPU",
            "63 raw; 55.6 in the example output of a tutorial after NVIDIA's post on NVbandwidth",
        ],
        [
            "H200 SXM: BF16 dense, memory",
            f"{a.flops / 1e12:.0f} TFLOP/s, {a.gpu_bytes / 1e9:.0f} GB",
            "data set *ai-inference-hardware-economics-2026* (Hugging Face)",
        ],
        ["prefill reaches", f"{a.busy:.0%} of it, at every TP size", "assumed; flatters computing at TP=8"],
        ["strided copies in its HBM3e", f"{a.hbm / 1e12:.1f} TB/s", "assumed: 40 % of 4.8"],
        [
            "one kernel or copy, launching thread",
            f"{a.call * 1e6:.0f} µs",
            "5 measured here (Python, slicing, PyTorch's dispatch); 5 for CUDA: Wu et al., arXiv 2602.21548, "
            "found 5 to 7 a `cudaMemcpyAsync`",
        ],
        ["network of a server", f"{a.network / 1e9:.0f} GB/s", "assumed; 100 Gbit/s is 12.5 raw"],
        [
            "one GET",
            f"{a.stream / 1e6:.1f} MB/s after {a.first_byte * 1e3:.0f} ms",
            f"{_PATTERNS}: 85 to 90 MB/s a connection; {_GUIDE}: 100 to 200 ms",
        ],
        [
            "an I/O process reads",
            f"{a.fetch / 1e9:.1f} GB/s",
            "measured here: CPU time of `get_into`, plain http on loopback; https is slower and was not measured",
        ],
        [
            "digests, one core a process",
            f"XXH3 {a.digest / 1e9:.0f}, BLAKE3 {BLAKE3_BYTES_PER_S / 1e9} GB/s",
            "ARCHITECTURE.md; of cells in the CPU's cache",
        ],
        ["I/O processes × threads", f"{a.io_processes} × {a.load_threads}", "defaults on 32 CPUs or more"],
        ["S3, a partitioned prefix", rates, _GUIDE],
        [
            "S3 Standard, us-east-1",
            prices,
            "list prices as quoted by usage.ai, *S3 Cost Calculator Guide* (June 2026), and devnotes.tech; "
            "traffic to EC2 in the same region is free",
        ],
        [
            "a GPU hour",
            f"${a.dollars_gpu_second * 3600:.2f}",
            "an eighth of p5en.48xlarge on demand, us-east-1, $63.296: dstack, pull request 4110 (August 2026)",
        ],
        ["a server's traffic", traffic, "assumed; hits in host memory would lower all rates"],
    ]
    return _table(["what", "value", "source"], rows)


# -- plots -----------------------------------------------------------------------------------------------------------


def plot_reload(path: Path) -> None:
    """Seconds over the length of the prefix, a panel a model, at the largest TP size."""
    tokens = [2**n for n in range(12, 18)]
    tp = TP_SIZES[-1]
    curves: list[tuple[str, str, Callable[[Model, int], float]]] = [
        (f"computing, TP={tp}", "C3", lambda m, n: prefill_seconds(m, n, tp, DEFAULT)),
        (f"reload, {DEFAULT.io_processes} I/O processes", "C0", lambda m, n: load_seconds(m, n, tp, DEFAULT)),
        (f"reload, {TUNED.io_processes} I/O processes", "C2", lambda m, n: load_seconds(m, n, tp, TUNED)),
        ("of it: slots to pages", "C7", lambda m, n: device_seconds(rank_work(m, tp), n // 256, DEFAULT)),
    ]
    figure, axes = _figure(len(MODELS), (8.4, 3.0))
    for axis, model in zip(axes, MODELS, strict=True):
        for label, colour, seconds in curves:
            axis.loglog(tokens, [seconds(model, n) for n in tokens], "o-", color=colour, ms=3, label=label)
        axis.set_title(model.name, fontsize=9)
        axis.set_xlabel("tokens of the prefix")
        axis.set_xticks(tokens[::2], [f"{n // 1024}k" for n in tokens[::2]])
        axis.minorticks_off()
    axes[0].set_ylabel("seconds")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside upper center", frameon=False)
    _save(figure, path)


def plot_fleet(path: Path) -> None:
    """GET and HEAD requests a second over the number of servers, and what some numbers of partitions take."""
    servers = [10, 30, 100, 300, 1000]
    figure, (axis,) = _figure(1, (5.4, 3.2))
    for model in MODELS:
        rates = [fleet_load(model, n, TRAFFIC, DEFAULT).gets for n in servers]
        axis.loglog(servers, rates, "o-", ms=3, label=model.name)
    for partitions, x, side in ((1, servers[-1], "right"), (16, servers[0], "left"), (256, servers[0], "left")):
        rate = partitions * DEFAULT.gets_a_partition
        axis.axhline(rate, color="C7", lw=0.8, ls="--")
        text = f"{partitions} partition{'s' * (partitions > 1)}"
        axis.text(x, rate * 1.1, text, fontsize=7, color="C7", ha=side)
    axis.set_xlabel("servers")
    axis.set_ylabel("GET and HEAD a second")
    axis.legend(fontsize=7, loc="lower right")
    _save(figure, path)


def _figure(panels: int, inches: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=100, facecolor="white", layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.grid(color="0.9", lw=0.6)
        axis.tick_params(labelsize=8)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Software": None})

"""`tplayout convert`: stores, per-rank shards and other caches' files into one another, chunk sizes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tplayout.admin.work import Work
from tplayout.arguments import format_size
from tplayout.cli.common import (
    count_of,
    dry_run_option,
    emit_json,
    encryption_key_option,
    json_option,
    note,
    progress,
    say,
    secret_option,
    store_options,
)
from tplayout.cli.convert_peers import (
    convert_peer,
    convert_to_tier,
    convert_to_transformers,
    convert_transformers,
    kind_of,
    peer_options,
)
from tplayout.cli.sides import (
    KEYS_RULE,
    chosen_prefixes,
    destination_key_option,
    destination_options,
    is_local,
    local_path,
    memory_jobs_option,
    namespace_option,
    note_unsigned,
    open_destination,
    open_source,
    secrets_of_destination,
    secrets_of_source,
    selection_options,
)
from tplayout.errors import ConfigError
from tplayout.format.layout import CODEC_AES_256_GCM, CODECS

if TYPE_CHECKING:
    from tplayout.admin.convert import Report
    from tplayout.format.identity import Identity

DTYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")

EPILOG = f"""{KEYS_RULE} Files of other formats are in clear.

\b
JSON: {{"from", "to", "namespace", "prefixes", "objects_written", "objects_present",
  "objects_absent", "files_written", "files_present", "bytes", "bytes_read", "rest_tokens",
  "skipped": {{name: reason}}, "damaged": {{object: reason}}, "losses": {{group: {{"max", "mean",
  "largest_value", "values", "clamped"}}}}, "dry_run"}}. bytes_read, of a store into a store:
  what the objects that were read take in SRC.
"""


@click.command("convert", epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--tp", type=click.IntRange(1, 4096), help="Write per-rank shards of this TP size into DST.")
@click.option("--pp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Pipeline stages of the shards.")
@click.option("--pp-partition", metavar="N,N,…", help="Layers of each stage; without it as vLLM splits them.")
@click.option("--chunk-tokens", type=click.IntRange(1, 65536), help="Write chunks of this size.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Write KV of this dtype.")
@click.option("--codec", type=click.Choice(CODECS), help="Keep the objects in DST so.")
@click.option("--lossy", is_flag=True, help="Allow a dtype that loses precision; the error is measured and printed.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The model's directory, for files that hold no identity.",
)
@click.option("--weights-label", help="Names the model's weights where they have no files.")
@click.option(
    "--compute-dtype", default="auto", show_default=True, help="The engine's --dtype, for other caches' files."
)
@peer_options
@namespace_option
@selection_options
@memory_jobs_option
@dry_run_option
@secret_option
@encryption_key_option
@destination_key_option
@store_options
@destination_options
@json_option
def command(source: str, destination: str, as_json: bool, **options: Any) -> int:
    """Convert what SRC holds into what DST shall hold.

    \b
    SRC                        DST
    per-rank shards            a store: one directory a prefix, any TP and PP size
    a store, with --tp         per-rank shards of that TP size
    a store                    a store with another --chunk-tokens, --dtype or --codec
    vLLM's tier                a store; with --tp the tier of that TP size
    a store, --engine-config   vLLM's tier, of the server which wrote that config.json
    ExampleConnector, LMCache  a store
    a store, --transformers    a file of one prompt for Hugging Face transformers; back too

    Per-rank shards are safetensors files, one a rank, with tensors `layers.<n>.<part>` of [token, head, dim]. What SRC
    is, is read from its files. Other caches' files do not tell everything: --tokens and --model are needed, and what is
    stated about the engine is checked against sizes and values. SRC is never changed; running it again does only what
    is missing.
    """
    with progress("converting") as tick:
        work = Work(options["jobs"], tick, options["dry_run"])
        kind, report = _convert(source, destination, options, work)
    document = _document(kind, report, options["dry_run"])
    if as_json:
        emit_json(document)
    else:
        _show(kind[1], report, options["dry_run"])
    if not report.prefixes:
        note(f"{source} holds no prefix to convert")
    return 0 if report.complete and report.prefixes else 1


def _convert(source: str, destination: str, options: dict[str, Any], work: Work) -> tuple[tuple[str, str], Report]:
    from tplayout.admin.places import check_separate, check_source
    from tplayout.admin.shards import find_shard_sets

    check_separate(source, destination)
    if is_local(source):
        check_source(local_path(source))
    sets = find_shard_sets(local_path(source)) if is_local(source) else []
    to_shards = options["tp"] is not None
    if options["engine_config"] is not None:
        _refuse(options, "a store to vLLM's tier", "codec", "dst_encryption_key")
        return ("store", "vllm-tier"), convert_to_tier(source, destination, options, work)
    if options["transformers"]:
        _refuse(options, "a store to a file for transformers", "codec", "dst_encryption_key")
        return ("store", "transformers"), convert_to_transformers(source, destination, options, work)
    if is_local(source) and local_path(source).is_file():
        _refuse(
            options, "a file for transformers", "codec", "tp", "lossy", "prefixes", "token_files", "namespace", "salt"
        )
        return ("transformers", "store"), convert_transformers(source, destination, options, work)
    peer = None if sets else kind_of(source)
    if peer is not None:
        _refuse(options, "other caches' files", "codec", "lossy", "prefixes", "namespace", "salt")
        return convert_peer(peer, source, destination, options, work)
    if sets and to_shards:
        raise ConfigError("SRC holds per-rank shards: convert them into a store first, and that to --tp")
    if sets:
        return ("shards", "store"), _from_shards(sets, source, destination, options, work)
    if to_shards:
        return ("store", "shards"), _to_shards(source, destination, options, work)
    if options["chunk_tokens"] is None and options["dtype"] is None and options["codec"] is None:
        raise ConfigError(
            f"{source}: no per-rank shards here. For a store say what to make of it: --tp, --chunk-tokens, --dtype or "
            "--codec; `tplayout cp` copies it as it is"
        )
    return ("store", "store"), _to_store(source, destination, options, work)


def _from_shards(sets: Sequence[Path], source: str, destination: str, options: dict[str, Any], work: Work) -> Report:
    from tplayout.admin.convert import import_shards

    _refuse(
        options, "shards to a store", "codec", "chunk_tokens", "dtype", "lossy", "prefixes", "token_files", "namespace"
    )
    with open_destination(source, destination, options) as store:
        identity = _identity(options, sets)
        model = options["model"].resolve().name if options["model"] else ""
        return import_shards(sets, store, identity, model, secrets_of_destination(options), work)


def _identity(options: dict[str, Any], sets: Sequence[Path]) -> Identity | None:
    """The identity of --model with the chunk size of the shards."""
    if options["model"] is None:
        return None
    from tplayout.admin.shards import ShardSet
    from tplayout.model import VLLM_DTYPES, describe_model

    with ShardSet(sets[0]) as first:
        geometry = first.geometry
    return describe_model(
        options["model"],
        kv_dtype=VLLM_DTYPES.get(geometry.groups[0].dtype, "auto"),
        chunk_tokens=geometry.chunk_tokens,
        weights_label=options["weights_label"],
    )


def _to_shards(source: str, destination: str, options: dict[str, Any], work: Work) -> Report:
    from tplayout.admin.convert import export_shards, stages_of
    from tplayout.admin.namespaces import choose_namespace
    from tplayout.admin.places import check_directory
    from tplayout.admin.selection import read_token_file

    _refuse(options, "a store to shards", "codec", "dst_encryption_key", "chunk_tokens", "dtype", "lossy", "model")
    if not is_local(destination):
        raise ConfigError(f"DST {destination}: per-rank shards are written to a local directory")
    check_directory(local_path(destination))
    prompts = [read_token_file(path) for path in options["token_files"]]
    with open_source(source, destination, options) as store:
        origin = choose_namespace(store, options["namespace"], secrets_of_source(options))
        stages = stages_of(origin.identity.geometry, options["pp"], _partition(options["pp_partition"]))
        keys, index = chosen_prefixes(origin, prompts, options)
        return export_shards(origin, local_path(destination), options["tp"], stages, keys, index, work)


def _to_store(source: str, destination: str, options: dict[str, Any], work: Work) -> Report:
    from tplayout.admin.copy import recode
    from tplayout.admin.namespaces import choose_namespace
    from tplayout.admin.rechunk import changed_identity, rechunk
    from tplayout.admin.selection import read_token_file

    _refuse(options, "a store to a store", "model", "pp_partition")
    prompts = [read_token_file(path) for path in options["token_files"]]
    with (
        open_source(source, destination, options) as store,
        open_destination(source, destination, options) as target,
    ):
        origin = choose_namespace(store, options["namespace"], secrets_of_source(options))
        identity = changed_identity(origin.identity, options["chunk_tokens"], options["dtype"])
        keys, index = chosen_prefixes(origin, prompts, options)
        codec, secrets = options["codec"], secrets_of_destination(options)
        if codec not in (None, CODEC_AES_256_GCM):
            _refuse(options, f"--codec {codec}, which does not encrypt", "dst_encryption_key")
        if options["chunk_tokens"] is None and options["dtype"] is None:
            _refuse(options, "--codec alone", "lossy")
            report = recode(origin, target, codec, secrets, keys, index, work)
        else:
            report = rechunk(origin, target, identity, options["lossy"], secrets, keys, index, work, codec)
        note_unsigned(origin.document.storage.key_id is not None, options)
        return report


def _partition(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--pp-partition {text!r} must be layers a stage with commas between: 10,12") from None


def _refuse(options: dict[str, Any], what: str, *names: str) -> None:
    """ConfigError for options that this conversion would ignore."""
    flags = {"prefixes": "--prefix", "token_files": "--tokens", "dst_encryption_key": "--dst-encryption-key-file"}
    for name in names:
        if options[name] not in (None, False, (), ""):
            raise ConfigError(f"{flags.get(name, '--' + name.replace('_', '-'))} does not go with {what}")


def _document(kind: tuple[str, str], report: Report, dry_run: bool) -> dict[str, Any]:
    losses = getattr(report, "losses", {})
    to_store = kind[1] == "store"  # else the tally is of what was read for the files
    return {
        "from": kind[0],
        "to": kind[1],
        "namespace": report.namespace,
        "prefixes": report.prefixes,
        "objects_written": report.tally.written if to_store else 0,
        "objects_present": report.tally.present if to_store else 0,
        "objects_absent": report.tally.absent,
        "files_written": report.files_written,
        "files_present": report.files_present,
        "bytes": report.tally.nbytes,
        "bytes_read": report.bytes_read,
        "rest_tokens": report.rest,
        "skipped": report.skipped,
        "damaged": report.tally.damaged,
        "losses": {
            name: {
                "max": loss.max,
                "mean": loss.mean,
                "largest_value": loss.largest,
                "values": loss.count,
                "clamped": loss.clamped,
            }
            for name, loss in losses.items()
        },
        "dry_run": dry_run,
    }


def _show(target: str, report: Report, dry_run: bool) -> None:
    would = "would write" if dry_run else "wrote"
    if target != "store":
        files = count_of(report.files_written, "file")
        say(f"{count_of(report.prefixes, 'prefix')}: {would} {files}, {report.files_present} were there")
    else:
        tally = report.tally
        before = f", {format_size(report.bytes_read)} before" if report.bytes_read and not dry_run else ""
        say(
            f"{count_of(report.prefixes, 'prefix')} into namespace {report.namespace}: {would} "
            f"{count_of(tally.written, 'object')} ({format_size(tally.nbytes)}{before}), {tally.present} were there"
        )
        if tally.absent:
            say(f"{tally.absent} objects are not to be had: SRC does not hold these windows any more")
    for name, loss in getattr(report, "losses", {}).items():
        if not loss.count:  # all were there
            continue
        say(
            f"group {name}: error at most {loss.max:.6g}, mean {loss.mean:.6g}, of {loss.count} values up to "
            f"{loss.largest:.6g}; {loss.clamped} clamped to the largest value"
        )
    if report.rest:
        say(f"{report.rest} tokens behind the last full chunks were left out")
    for name, reason in report.skipped.items():
        note(f"skipped: {name}: {reason}")
    for reason in report.tally.damaged.values():
        note(f"damaged: {reason}")

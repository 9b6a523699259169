"""`tplayout inspect`: namespaces in full, or one chunk from the inside."""

from __future__ import annotations

import math
from typing import Any

import click

from tplayout.admin.catalog import Namespace, Secrets, scan
from tplayout.admin.heatmap import draw
from tplayout.admin.inspection import Cell, Opened, Statistics, cells, find, norms, read, statistics
from tplayout.arguments import format_size
from tplayout.cli.common import (
    emit_json,
    encryption_key_option,
    json_option,
    moment,
    note,
    open_store,
    say,
    secret_option,
    store_options,
    table,
)
from tplayout.cli.describe import group_json, group_shape, namespace_json
from tplayout.errors import ConfigError
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.keys import NO_EXTRAS, ROOT
from tplayout.format.layout import CODEC_NONE, ChunkLayout
from tplayout.storage.base import Store

_EPILOG = """\b
JSON:
  url, namespaces        as those of `ls`, and of each: identity (all that is in the
                         namespace's hash), layouts [{group, bytes, data_start, sections,
                         section_bytes, cell_bytes, digest_bytes}] of its objects
With CHUNK:
  url, object, bytes, modified, namespace, key, group, group_index
  sound                  true, false, or null: keyed digests and no secret, or encrypted
                         and no key
  fault                  {reason, detail} or null
  parent, extras         hex; null if the object ends before. first_chunk: no parent;
                         has_extras: adapter, multimodal items or salt
  tokens                 token ids
  digest, key_id, codec, encryption_key_id, layout; group is one of `ls`' groups
  cells                  [{head, layer, digest, ok}]
  siblings               objects of the chunk's other groups
  statistics             [{part, min, max, mean, std, nans, infinities}], with --cell
  heatmap                the file, with --heatmap

\b
Examples:
  tplayout inspect /var/cache/kv
  tplayout inspect /var/cache/kv 5860abe3 --cell 2:17
  tplayout inspect /var/cache/kv 5860abe3 --heatmap chunk.png
"""


def _cell(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    head, colon, layer = value.partition(":")
    if not (colon and head.isdecimal() and layer.isdecimal()):
        raise click.BadParameter(f"{value!r} must be HEAD:LAYER, as 2:17")
    return int(head), int(layer)


@click.command(epilog=_EPILOG)
@click.argument("url")
@click.argument("chunk", required=False)
@click.option("--namespace", metavar="HEX", help="Only this namespace (its first digits).")
@click.option("--group", metavar="NAME", help="Which group's object, by name or index; the first by default.")
@click.option("--cell", metavar="HEAD:LAYER", callback=_cell, help="Statistics of one cell: min, max, mean, std, NaNs.")
@click.option("--cells", "list_cells", is_flag=True, help="List every cell with its digest, not only the damaged.")
@click.option("--tokens", "list_tokens", is_flag=True, help="Print all token ids, not only the first.")
@click.option("--heatmap", metavar="FILE.png", help="Draw the norm of every head and layer (needs Pillow).")
@secret_option
@encryption_key_option
@store_options
@json_option
def command(
    url: str,
    chunk: str | None,
    namespace: str | None,
    group: str | None,
    cell: tuple[int, int] | None,
    list_cells: bool,
    list_tokens: bool,
    heatmap: str | None,
    secret: bytes | None,
    encryption_key: EncryptionKey | None,
    storage_options: dict[str, Any],
    timeout: float,
    as_json: bool,
) -> int:
    """Show everything about the namespaces of the store at URL, or about one CHUNK.

    CHUNK is the beginning of a chunk's key as `ls` prints it, or an object's name (in tplayout-quarantine/ too). The
    object is read whole and verified, cell by cell; a damaged one is shown as far as it goes, and the exit code is 1.
    """
    with open_store(url, storage_options, timeout, must_exist=True) as store:
        if chunk is None:
            if cell or heatmap or group:
                raise ConfigError("--cell, --heatmap and --group need a CHUNK; `tplayout ls URL NAMESPACE` shows keys")
            _show_namespaces(store, namespace, as_json)
            return 0
        space, stored, siblings = find(store, chunk, namespace, group)
        opened = read(store, space, stored, Secrets(secret, encryption_key), siblings)
    if opened.sealed and (cell is not None or heatmap is not None):
        raise opened.fault or ConfigError(
            f"{opened.name} is encrypted: --cell and --heatmap need its key {opened.encryption_key_id}: give "
            "--encryption-key-file or TPLAYOUT_ENCRYPTION_KEY"
        )
    found = list(cells(opened))
    of_cell = None if cell is None else statistics(opened, *cell)
    if heatmap is not None:
        _draw(heatmap, opened, found)
    if as_json:
        emit_json({"url": store.url, **_chunk_json(opened, found), **_extra_json(of_cell, heatmap)})
    else:
        _print_chunk(opened, found, list_tokens)
        if list_cells:
            _print_cells(found)
        if of_cell is not None and cell is not None:
            _print_statistics(cell, of_cell)
        if heatmap is not None:
            note(f"drawn: {heatmap}")
    return 0 if opened.fault is None else 1


def _show_namespaces(store: Store, namespace: str | None, as_json: bool) -> None:
    spaces = list(scan(store, namespace).namespaces.values())
    if as_json:
        emit_json({"url": store.url, "namespaces": [_namespace_json(space) for space in spaces]})
        return
    for space in spaces:
        _print_namespace(space)
    if not spaces:
        note(f"{store.url} holds no namespace")


def _draw(path: str, opened: Opened, found: list[Cell]) -> None:
    layers = opened.layout.group.layers
    damaged = {(one.head, layers.index(one.layer)) for one in found if one.ok is False}
    title = f"{opened.key.hex()[:16]} group {opened.layout.group.name}" + (" DAMAGED" if opened.fault else "")
    draw(path, title, norms(opened), layers, damaged)


def _word(ok: bool | None) -> str:
    return {True: "ok", False: "DAMAGED", None: "?"}[ok]


def _print_namespace(space: Namespace) -> None:
    say(f"namespace {space.name}")
    if space.document is None:
        say(f"  {space.fault}")
        return
    identity, facts = space.document.identity, space.document.storage
    say(f"  model         {space.document.model}")
    say(f"  weights       {identity.weights}")
    say(f"  computed in   {identity.compute_dtype}, weights quantised: {identity.quantization or 'no'}")
    key = f", encryption key {facts.encryption_key_id}" if facts.encryption_key_id else ""
    say(f"  digests       {facts.digest}{f', secret {facts.key_id}' if facts.key_id else ''}; codec {facts.codec}{key}")
    say(f"  chunks        {space.chunks} of {identity.geometry.chunk_tokens} tokens, {format_size(space.nbytes)}")
    for group, layout in zip(identity.geometry.groups, space.layouts(), strict=True):
        window = f", window {group.window}" if group.window else ""
        say(f"  group {layout.group_index}       {group.name}: {group.dtype} {group_shape(group)}{window}")
        stored = "encrypted" if facts.encryption_key_id else "packed"
        plain = "" if facts.codec == CODEC_NONE else f", before they are {stored}"
        sizes = f"objects of {format_size(layout.nbytes)}{plain}, cells of {format_size(layout.cell_bytes)}"
        say(f"{'':<16}{sizes}")
    for name, value in sorted(identity.config.items()):
        say(f"  config        {name} = {value}")


def _namespace_json(space: Namespace) -> dict[str, Any]:
    document = space.document
    identity = None if document is None else document.identity.to_json()
    layouts = None if document is None else [_layout_json(layout) for layout in space.layouts()]
    return {**namespace_json(space), "identity": identity, "layouts": layouts}


def _layout_json(layout: ChunkLayout) -> dict[str, Any]:
    return {
        "group": layout.group.name,
        "bytes": layout.nbytes,
        "data_start": layout.data_start,
        "sections": layout.sections,
        "section_bytes": layout.section_bytes,
        "cell_bytes": layout.cell_bytes,
        "digest_bytes": layout.digest_size,
    }


def _chunk_json(opened: Opened, found: list[Cell]) -> dict[str, Any]:
    chunk, layout, fault = opened.chunk, opened.layout, opened.fault
    return {
        "object": opened.name,
        "bytes": opened.size,
        "modified": moment(opened.modified),
        "namespace": opened.space.name,
        "key": opened.key.hex(),
        "group": group_json(layout.group),
        "group_index": layout.group_index,
        "sound": False if fault is not None else None if opened.unsure else True,
        "fault": None if fault is None else {"reason": fault.reason.value, "detail": fault.detail},
        "parent": None if chunk is None else chunk.parent.hex(),
        "extras": None if chunk is None else chunk.extras.hex(),
        "first_chunk": None if chunk is None else chunk.parent == ROOT,
        "has_extras": None if chunk is None else chunk.extras != NO_EXTRAS,
        "tokens": None if chunk is None else list(chunk.tokens),
        "digest": layout.digest_name,
        "key_id": layout.key_id,
        "codec": opened.codec,
        "encryption_key_id": opened.encryption_key_id,
        "layout": _layout_json(layout),
        "cells": [{"head": one.head, "layer": one.layer, "digest": one.digest.hex(), "ok": one.ok} for one in found],
        "siblings": list(opened.siblings),
    }


def _extra_json(of_cell: list[Statistics] | None, heatmap: str | None) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if of_cell is not None:
        extra["statistics"] = [
            {
                "part": one.part,
                "min": _number(one.minimum),
                "max": _number(one.maximum),
                "mean": _number(one.mean),
                "std": _number(one.std),
                "nans": one.nans,
                "infinities": one.infinities,
            }
            for one in of_cell
        ]
    if heatmap is not None:
        extra["heatmap"] = heatmap
    return extra


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print_chunk(opened: Opened, found: list[Cell], list_tokens: bool) -> None:
    layout, chunk = opened.layout, opened.chunk
    say(f"chunk {opened.key.hex()}")
    say(f"  object    {opened.name}")
    say(f"  namespace {opened.space.name}{_model(opened.space)}")
    say(f"  group     {layout.group_index} {layout.group.name}: {layout.group.dtype} {group_shape(layout.group)}")
    whole = "layout" if opened.codec == CODEC_NONE else "plain"
    say(
        f"  bytes     {opened.size} ({whole}: {layout.nbytes}; header {layout.data_start}, "
        f"a head {layout.section_bytes}, a cell {layout.cell_bytes})"
    )
    if chunk is not None:
        shown = chunk.tokens if list_tokens else chunk.tokens[:12]
        dots = "" if len(shown) == len(chunk.tokens) else f" … ({len(chunk.tokens)})"
        say(f"  parent    {'none: it begins a prefix' if chunk.parent == ROOT else chunk.parent.hex()}")
        say(f"  extras    {'none' if chunk.extras == NO_EXTRAS else f'{chunk.extras.hex()} (adapter, items or salt)'}")
        say(f"  tokens    {' '.join(map(str, shown))}{dots}")
    key = f", encryption key {opened.encryption_key_id}" if opened.encryption_key_id else ""
    secret = f", secret {layout.key_id}" if layout.key_id else ""
    say(f"  digests   {layout.digest_name}{secret}; codec {opened.codec}{key}")
    damaged = [one for one in found if one.ok is False]
    missing = layout.group.heads * len(layout.group.layers) - len(found)
    state = "not checked" if opened.unsure else f"{len(damaged)} damaged"
    if opened.sealed:
        say(f"  cells     {missing}, not to be opened")
    else:
        say(f"  cells     {len(found)}, {state}" + (f", {missing} cut off" if missing else ""))
    for one in damaged[:20]:
        say(f"            head {one.head}, layer {one.layer}")
    if len(damaged) > 20:
        say(f"            … and {len(damaged) - 20} more (--cells)")
    for name in opened.siblings:
        say(f"  also      {name}")
    if opened.fault is not None:
        say(f"  DAMAGED   {opened.fault.reason}: {opened.fault.detail}")
    elif opened.sealed:
        compared = "not verified" if opened.hasher is None else "its stored bytes match their digests"
        say(f"  encrypted: {compared}; the key {opened.encryption_key_id} shows more (--encryption-key-file)")
    elif opened.unsure:
        say(f"  not verified: the digests need the secret {layout.key_id} (--secret-key-file)")
    else:
        say("  sound")


def _model(space: Namespace) -> str:
    return f" ({space.document.model})" if space.document is not None and space.document.model else ""


def _print_cells(found: list[Cell]) -> None:
    rows = [[str(one.head), str(one.layer), one.digest.hex(), _word(one.ok)] for one in found]
    table([">head", ">layer", "digest", ""], rows)


def _print_statistics(cell: tuple[int, int], of_cell: list[Statistics]) -> None:
    say(f"head {cell[0]}, layer {cell[1]}")
    rows = [
        [
            one.part,
            *(f"{value:.6g}" for value in (one.minimum, one.maximum, one.mean, one.std)),
            str(one.nans),
            str(one.infinities),
        ]
        for one in of_cell
    ]
    table(["part", ">min", ">max", ">mean", ">std", ">NaN", ">inf"], rows)

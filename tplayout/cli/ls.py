"""`tplayout ls`: the namespaces of a store, or the prefixes of one as a tree."""

from __future__ import annotations

from typing import Any

import click

from tplayout.admin.catalog import Catalog, Namespace, scan
from tplayout.admin.prefixes import Links, Segment, read_links, tree
from tplayout.arguments import format_size
from tplayout.cli.common import (
    age,
    count_of,
    emit_json,
    encryption_key_option,
    jobs_option,
    json_option,
    note,
    open_store,
    progress,
    say,
    store_options,
    table,
    unused_secret_option,
)
from tplayout.cli.describe import (
    SHORT,
    dtypes,
    namespace_json,
    segment_json,
    segment_place,
    segment_remark,
    shape,
    stored_as,
)
from tplayout.format.encryption_key import EncryptionKey
from tplayout.key_files import ENCRYPTION_KEY_ENV

_EPILOG = """\b
JSON:
  url, namespaces        [{namespace, model, weights, compute_dtype, quantization,
                         chunk_tokens, groups, digest, key_id, codec,
                         encryption_key_id, chunks, objects, bytes, oldest, newest,
                         fault}]; what namespace.json says is null where it cannot be
                         read, and fault says why; groups are
                         [{name, kind, layers, heads, parts: [{name, dim}], dtype, scales,
                         window}]
  foreign                files that are none of tplayout's
With NAMESPACE:
  url, namespace         as above
  prefixes               [{depth, first, last, start_token, tokens, chunks, bytes,
                         oldest, newest, waits_for, lacks}]: runs of chunks without a
                         fork; each continues the nearest one above it of a smaller
                         depth. start_token is null behind a gap, waits_for the key of
                         the missing chunk, lacks the groups that are missing; null
                         for an encrypted namespace without its key
  damaged                objects that are not what their name says; null as prefixes

\b
Examples:
  tplayout ls s3://bucket/kv
  tplayout ls /var/cache/kv 3f2a
"""


@click.command(epilog=_EPILOG)
@click.argument("url")
@click.argument("namespace", required=False)
@jobs_option
@unused_secret_option
@encryption_key_option
@store_options
@json_option
def command(
    url: str,
    namespace: str | None,
    jobs: int,
    encryption_key: EncryptionKey | None,
    storage_options: dict[str, Any],
    timeout: float,
    as_json: bool,
) -> None:
    """Show the namespaces of the store at URL; with NAMESPACE (its first digits) its prefixes as a tree.

    A namespace holds the chunks of one model with one set of weights, dtypes and chunk size. A prefix is a prompt's
    beginning as far as it is stored; "gap" marks chunks that no server can use before the missing one is stored again.
    Which chunk follows which in an encrypted namespace shows its key alone.
    """
    with open_store(url, storage_options, timeout, must_exist=True) as store:
        catalog = scan(store, namespace)
        if namespace is None:
            if as_json:
                spaces = [namespace_json(space) for space in catalog.namespaces.values()]
                emit_json({"url": store.url, "namespaces": spaces, "foreign": len(catalog.foreign)})
            else:
                _print_namespaces(store.url, catalog)
            return
        (space,) = catalog.namespaces.values()
        geometry = space.known().identity.geometry
        document: dict[str, Any] = {"url": store.url, "namespace": namespace_json(space)}
        if space.encrypted and encryption_key is None:
            if as_json:
                emit_json({**document, "prefixes": None, "damaged": None})
            else:
                _print_about(space)
                note(
                    "the prefixes cannot be shown without the key: give --encryption-key-file or " + ENCRYPTION_KEY_ENV
                )
            return
        with progress("reading prefixes") as tick:
            links = read_links(store, space, jobs, tick, encryption_key)
        segments = tree(geometry, space.objects, links.parents)
        if as_json:
            prefixes = [segment_json(segment, geometry.chunk_tokens) for segment in segments]
            damaged = sorted(stored.name for stored in links.damaged)
            emit_json({**document, "prefixes": prefixes, "damaged": damaged})
        else:
            _print_about(space)
            _print_prefixes(space, segments, links)


def _print_namespaces(url: str, catalog: Catalog) -> None:
    if not catalog.namespaces:
        note(f"{url} holds no namespace")
    else:
        columns = ["namespace", "model", "dtype", ">chunk", "geometry", "codec"]
        columns += [">chunks", ">bytes", ">oldest", ">newest"]
        table(columns, [_row(space) for space in catalog.namespaces.values()])
    if catalog.foreign:
        note(f"{len(catalog.foreign)} files are none of tplayout's; `tplayout verify` names them")


def _row(space: Namespace) -> list[str]:
    oldest, newest = space.times()
    counts = [str(space.chunks), format_size(space.nbytes), age(oldest), age(newest)]
    if space.document is None:
        reason = "missing" if space.info is None else "damaged"
        return [space.name, f"(namespace.json is {reason})", "?", "?", "?", "?", *counts]
    geometry = space.document.identity.geometry
    about = [space.document.model, dtypes(geometry), str(geometry.chunk_tokens), shape(geometry)]
    about.append(stored_as(space.document.storage, full=False))
    return [space.name, *about, *counts]


def _print_about(space: Namespace) -> None:
    identity = space.known().identity
    tokens = identity.geometry.chunk_tokens
    say(f"namespace {space.name}: {space.known().model}")
    say(f"  weights  {identity.weights}")
    say(f"  KV       {dtypes(identity.geometry)}, {shape(identity.geometry)}, computed in {identity.compute_dtype}")
    say(f"  stored   {count_of(space.chunks, 'chunk')} of {tokens} tokens, {format_size(space.nbytes)}")
    say(f"  codec    {stored_as(space.known().storage)}")


def _print_prefixes(space: Namespace, segments: list[Segment], links: Links) -> None:
    tokens = space.known().identity.geometry.chunk_tokens
    say()
    if segments:
        rows = [
            [
                segment_place(segment, tokens),
                str(segment.chunks),
                format_size(segment.nbytes),
                age(segment.newest),
                segment.last.hex()[:SHORT],
                segment_remark(segment),
            ]
            for segment in segments
        ]
        table(["tokens", ">chunks", ">bytes", ">age", "last chunk", ""], rows)
    if links.damaged:
        note(f"{len(links.damaged)} objects are not what their name says; `tplayout verify` tells more")

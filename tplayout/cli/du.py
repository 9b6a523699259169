"""`tplayout du`: what takes the bytes of a store."""

from __future__ import annotations

from typing import Any

import click

from tplayout.admin.catalog import Catalog, scan
from tplayout.admin.prefixes import read_links
from tplayout.admin.usage import AGES, PrefixShare, Share, by_age, by_namespace, by_prefix
from tplayout.arguments import format_size
from tplayout.cli.common import (
    age,
    emit_json,
    encryption_key_option,
    jobs_option,
    json_option,
    moment,
    note,
    open_store,
    progress,
    store_options,
    table,
    unused_secret_option,
)
from tplayout.cli.describe import SHORT
from tplayout.errors import ConfigError
from tplayout.format.encryption_key import EncryptionKey
from tplayout.storage.base import Store

_EPILOG = """\b
JSON:
  url, by, objects, bytes    of all that is counted
  rows, by namespace         [{name, model, objects, bytes, newest}]; the last names may
                             be "foreign" (none of tplayout's) and "tools" (quarantine)
  rows, by age               [{younger_than, objects, bytes}]: 1h 1d 7d 30d 1y older
                             unknown; each without the rows above it
  rows, by prefix            [{namespace, first, start_token, chunks, tokens, bytes,
                             newest}]: all prefixes that begin with the chunk `first`,
                             tokens: of the longest; start_token is null behind a gap
  left_out, by prefix        {namespace: reason}: unreadable ones, and encrypted ones without
                             their key
"""


@click.command(epilog=_EPILOG)
@click.argument("url")
@click.argument("namespace", required=False)
@click.option(
    "--by",
    type=click.Choice(["namespace", "prefix", "age"]),
    default="namespace",
    show_default=True,
    help="What to add up. prefix reads a few bytes of every chunk.",
)
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="Print so many prefixes (not JSON).")
@jobs_option
@unused_secret_option
@encryption_key_option
@store_options
@json_option
def command(
    url: str,
    namespace: str | None,
    by: str,
    top: int,
    jobs: int,
    encryption_key: EncryptionKey | None,
    storage_options: dict[str, Any],
    timeout: float,
    as_json: bool,
) -> None:
    """Show what takes the bytes of the store at URL, or of one NAMESPACE (its first digits) in it."""
    with open_store(url, storage_options, timeout, must_exist=True) as store:
        catalog = scan(store, namespace)
        objects = [stored for space in catalog.namespaces.values() for stored in space.objects]
        total = {"objects": len(objects), "bytes": sum(stored.size for stored in objects)}
        rows: list[dict[str, Any]]
        if by == "namespace":
            shares = by_namespace(catalog)
            rows = [_share_json(share, catalog) for share in shares]
            total = {"objects": sum(s.objects for s in shares), "bytes": sum(s.nbytes for s in shares)}
        elif by == "age":
            rows = [
                {"younger_than": share.name, "objects": share.objects, "bytes": share.nbytes}
                for share in by_age(objects)
            ]
        else:
            prefixes, left_out = _prefixes(store, catalog, jobs, encryption_key)
            rows = [_prefix_json(share) for share in prefixes]
        if as_json:
            more = {"left_out": left_out} if by == "prefix" else {}
            emit_json({"url": store.url, "by": by, **total, "rows": rows, **more})
        elif by == "namespace":
            _print_namespaces(shares, catalog)
        elif by == "age":
            _print_ages(rows)
        else:
            if prefixes:
                _print_prefixes(prefixes[:top])
            for name, reason in left_out.items():
                space = catalog.namespaces[name]
                note(f"left out, {len(space.objects)} objects, {format_size(space.nbytes)}: {reason}")
            if len(prefixes) > top:
                rest = sum(share.nbytes for share in prefixes[top:])
                note(f"and {len(prefixes) - top} more with {format_size(rest)} (--top)")
        if not as_json:
            note(f"{total['objects']} objects, {format_size(total['bytes'])}")


def _prefixes(
    store: Store, catalog: Catalog, jobs: int, encryption_key: EncryptionKey | None
) -> tuple[list[PrefixShare], dict[str, str]]:
    """The prefixes, the largest first, and why namespaces are left out."""
    shares: list[PrefixShare] = []
    left_out: dict[str, str] = {}
    for space in catalog.namespaces.values():
        if space.document is None:
            left_out[space.name] = f"namespace {space.name}: {space.fault}"
            continue
        try:
            with progress(f"reading {space.name[:SHORT]}") as tick:
                shares += by_prefix(space, read_links(store, space, jobs, tick, encryption_key))
        except ConfigError as error:  # encrypted with a key that is not given
            left_out[space.name] = str(error)
    return sorted(shares, key=lambda share: -share.nbytes), left_out


def _model(name: str, catalog: Catalog) -> str | None:
    space = catalog.namespaces.get(name)
    return None if space is None or space.document is None else space.document.model


def _share_json(share: Share, catalog: Catalog) -> dict[str, Any]:
    model, newest = _model(share.name, catalog), moment(share.newest)
    return {
        "name": share.name,
        "model": model,
        "objects": share.objects,
        "bytes": share.nbytes,
        "newest": newest,
    }


def _prefix_json(share: PrefixShare) -> dict[str, Any]:
    return {
        "namespace": share.namespace,
        "first": share.first.hex(),
        "start_token": share.start,
        "chunks": share.chunks,
        "tokens": share.tokens,
        "bytes": share.nbytes,
        "newest": moment(share.newest),
    }


def _print_namespaces(shares: list[Share], catalog: Catalog) -> None:
    rows = [
        [
            share.name,
            _model(share.name, catalog) or "",
            str(share.objects),
            format_size(share.nbytes),
            age(share.newest),
        ]
        for share in shares
    ]
    table(["namespace", "model", ">objects", ">bytes", ">newest"], rows)


def _print_ages(rows: list[dict[str, Any]]) -> None:
    names = {name: f"under {name}" for _, name in AGES}
    cells = [
        [names.get(row["younger_than"], row["younger_than"]), str(row["objects"]), format_size(row["bytes"])]
        for row in rows
    ]
    table(["age", ">objects", ">bytes"], cells)


def _print_prefixes(shares: list[PrefixShare]) -> None:
    rows = [
        [
            share.namespace[:SHORT],
            share.first.hex()[:SHORT],
            str(share.tokens),
            str(share.chunks),
            format_size(share.nbytes),
            age(share.newest),
            "behind a gap" if share.start is None else "",
        ]
        for share in shares
    ]
    table(["namespace", "first chunk", ">longest", ">chunks", ">bytes", ">newest", ""], rows)

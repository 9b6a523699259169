"""What verbs with a source and a destination share: two stores, their options, and which prefixes are meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tplayout.cli.common import encryption_key_of, note, open_store, parse_storage_options
from tplayout.errors import ConfigError
from tplayout.storage.base import Store

if TYPE_CHECKING:
    from tplayout.admin.catalog import Secrets
    from tplayout.admin.chains import Index
    from tplayout.admin.namespaces import OpenNamespace

F = TypeVar("F", bound=Callable[..., Any])

# For the help of every verb that writes chunks.
KEYS_RULE = """A key or secret that is given, by option or environment, holds for what is written too: it is encrypted
with the key, and its digests are keyed with the secret. Where the destination is there without, nothing is written.
Only `convert --codec none` decrypts."""


def _options(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, Any]:
    return parse_storage_options(values)


destination_options = click.option(
    "--dst-storage-option",
    "dst_storage_options",
    metavar="K=V",
    multiple=True,
    callback=_options,
    help="As --storage-option, for the second URL only, which then takes no other.",
)
destination_key_option = click.option(
    "--dst-encryption-key-file",
    "dst_encryption_key",
    metavar="FILE",
    callback=encryption_key_of,
    help="The key that DST is encrypted with; without it that of --encryption-key-file.",
)
namespace_option = click.option(
    "--namespace", metavar="HEX", help="The namespace, by its first digits; needed where a store has several."
)
memory_jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Objects at the same time. Each takes the memory of up to three.",
)


def selection_options(function: F) -> F:
    """--prefix, --tokens and --salt (parameters prefixes, token_files, salt)."""
    prefix = click.option(
        "--prefix",
        "prefixes",
        metavar="KEY",
        multiple=True,
        help="Only the prefix that ends with this chunk, by its key's first digits. May be repeated.",
    )
    tokens = click.option(
        "--tokens",
        "token_files",
        metavar="FILE",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Only the prefix of this prompt: token ids as JSON or text. May be repeated.",
    )
    salt = click.option("--salt", help="The cache salt of the prompts in --tokens.")
    return prefix(tokens(salt(function)))


def chosen_prefixes(
    origin: OpenNamespace, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]
) -> tuple[list[bytes] | None, Index | None]:
    """Last chunks of the prefixes that --prefix and `prompts` name, and the index that was read to find them.

    Both are None where nothing is named, which means all.
    """
    if not options["prefixes"] and not prompts:
        return None, None
    from tplayout.admin.chains import build_index
    from tplayout.admin.selection import selected

    index = build_index(origin)
    return selected(index, options["prefixes"], prompts, options["salt"]), index


def secrets_of_source(options: Mapping[str, Any]) -> Secrets:
    """What SRC needs, or the only store of a verb."""
    from tplayout.admin.catalog import Secrets

    return Secrets(options["secret"], options["encryption_key"])


def secrets_of_destination(options: Mapping[str, Any]) -> Secrets:
    """What DST needs: the same secret, and an encryption key that may be its own."""
    from tplayout.admin.catalog import Secrets

    return Secrets(options["secret"], options["dst_encryption_key"] or options["encryption_key"])


def note_unsigned(keyed: bool, options: Mapping[str, Any]) -> None:
    """Say that what nobody had vouched for has digests with the secret now. keyed: whether the source has such."""
    if options["secret"] is not None and not keyed:
        note("the source was written without a secret: it was checked against damage, not forgery, before it got one")


def check_kept(origin: OpenNamespace, options: Mapping[str, Any]) -> None:
    """ConfigError for a key or secret that would have to change what is written as the store has it."""
    facts, what = origin.document.storage, f"FILE holds objects as the store does, and namespace {origin.name} is"
    if options["encryption_key"] is not None and facts.encryption_key_id is None:
        raise ConfigError(f"{what} not encrypted: leave out the key, or encrypt first: tplayout cp URL NEW-URL")
    if options["secret"] is not None and facts.key_id is None:
        raise ConfigError(f"{what} written without a secret: leave it out, or give it one: tplayout cp URL NEW-URL")


def is_local(url: str) -> bool:
    """Whether a URL names the local file system, which takes no options."""
    from tplayout.admin.places import path_of

    return path_of(url) is not None


def open_source(source: str, destination: str, options: Mapping[str, Any]) -> Store:
    """The store that is read."""
    return open_store(source, _shared(source, destination, options), options["timeout"], must_exist=True)


def open_destination(source: str, destination: str, options: Mapping[str, Any]) -> Store:
    """The store that is written."""
    from tplayout.admin.places import check_directory

    if is_local(destination):
        check_directory(local_path(destination))
    own = options["dst_storage_options"] or _shared(destination, source, options)
    return open_store(destination, own, options["timeout"])


def _shared(url: str, other: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """--storage-option is for both URLs, but a local one takes none where the other is not."""
    return {} if is_local(url) and not is_local(other) else options["storage_options"]


def local_path(url: str) -> Path:
    """The path that a local URL names."""
    from tplayout.admin.places import path_of

    path = path_of(url)
    assert path is not None, url
    return path

"""What verbs share: options, opening a store, output as JSON or tables, progress on a terminal.

Text that comes from a store is shown without control characters: whoever may write there must not steer a terminal.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from tplayout import arguments
from tplayout.admin.progress import Progress, silent
from tplayout.errors import ConfigError
from tplayout.key_files import (
    ENCRYPTION_KEY_ENV,
    SECRET_ENV,
    check_secret,
    exposure,
    key_in_environment,
    read_key_file,
)
from tplayout.storage.base import DEFAULT_TIMEOUT_S, Store

if TYPE_CHECKING:
    from rich.console import Console

    from tplayout.format.encryption_key import EncryptionKey

F = TypeVar("F", bound=Callable[..., Any])

_NO_LIMIT = 4096  # columns of a table in a pipe
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _storage_options(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, Any]:
    return parse_storage_options(values)


def parse_storage_options(values: Sequence[str]) -> dict[str, Any]:
    """`K=V` items as a table. Dots in K nest; V is text, true or false; `K:=JSON` is any JSON value."""
    options: dict[str, Any] = {}
    for item in values:
        name, equals, text = item.partition("=")
        is_json = name.endswith(":")
        *outer, last = name.removesuffix(":").split(".")
        if not equals or not last or not all(outer):
            raise click.BadParameter(f"{name!r} must be K=V (text, true or false) or K:=JSON")
        try:
            value = json.loads(text) if is_json else {"true": True, "false": False}.get(text, text)
        except ValueError:
            raise click.BadParameter(f"{name!r}: what follows := is not JSON") from None
        table = options
        for part in outer:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise click.BadParameter(f"{name!r}: {part!r} is given as a value already")
        table[last] = value
    return options


def _secret(ctx: click.Context, param: click.Parameter, path: str | None) -> bytes | None:
    data = key_in_environment(SECRET_ENV) if path is None else read_key_file(path)
    secret = None if data is None else check_secret(data, path or SECRET_ENV)
    _warn_of_exposure(path)
    return secret


def encryption_key_of(ctx: click.Context, param: click.Parameter, path: str | None) -> EncryptionKey | None:
    """The key in the file that an option names; else, for --encryption-key-file, the environment's."""
    from tplayout.format.encryption_key import EncryptionKey

    if path is None and param.name != "encryption_key":
        return None
    text = key_in_environment(ENCRYPTION_KEY_ENV) if path is None else read_key_file(path)
    key = None if text is None else EncryptionKey.parse(text, path or ENCRYPTION_KEY_ENV)
    _warn_of_exposure(path)
    return key


def _warn_of_exposure(path: str | None) -> None:
    if path is not None and (line := exposure(path)):
        note(f"warning: {line}")


def store_options(function: F) -> F:
    """--storage-option (parameter storage_options) and --timeout (seconds)."""
    timeout = click.option(
        "--timeout",
        type=click.FloatRange(0, 86400, min_open=True, max_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Seconds that one store operation may take.",
    )
    options = click.option(
        "--storage-option",
        "storage_options",
        metavar="K=V",
        multiple=True,
        callback=_storage_options,
        help="An option of the store's file system, by fsspec's name (endpoint_url=…). Dots nest "
        "(config_kwargs.s3.addressing_style=path), K:=JSON gives numbers. May be repeated.",
    )
    return options(timeout(function))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document; its keys are below.")
secret_option = click.option(
    "--secret-key-file",
    "secret",
    metavar="FILE",
    callback=_secret,
    help=f"The secret of stores with keyed digests; or {SECRET_ENV} in the environment.",
)
unused_secret_option = click.option(
    "--secret-key-file",
    "secret",
    metavar="FILE",
    callback=lambda ctx, param, path: None if path is None else _secret(ctx, param, path),
    expose_value=False,
    help="Taken as by all verbs, and not needed here: no cell's digest is compared.",
)
encryption_key_option = click.option(
    "--encryption-key-file",
    "encryption_key",
    metavar="FILE",
    callback=encryption_key_of,
    help=f"The key of encrypted stores, as 64 hex digits; or {ENCRYPTION_KEY_ENV} in the environment.",
)
jobs_option = click.option(
    "--jobs", type=click.IntRange(1, 256), default=8, show_default=True, help="Store operations at the same time."
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def open_store(url: str, storage_options: Mapping[str, Any], timeout: float, must_exist: bool = False) -> Store:
    """The store at a URL. must_exist: raise as `check_store` if it cannot be one that is there."""
    from tplayout.admin.places import check_store
    from tplayout.storage.url import open_store as open_url

    store = open_url(url, storage_options, timeout)
    if must_exist:
        try:
            check_store(store)
        except BaseException:
            store.close()
            raise
    return store


def confirm(question: str, yes: bool) -> None:
    """Go on if the user agrees; click.Abort if not, ConfigError where nobody can be asked."""
    check_can_ask(question, yes)
    if not yes:
        click.confirm(question, abort=True, err=True)


def check_can_ask(question: str, yes: bool) -> None:
    """ConfigError where `confirm` would have nobody to ask."""
    if not yes and not sys.stdin.isatty():
        raise ConfigError(f"{question} Nobody can be asked here: add --yes, or look with --dry-run first")


def emit_json(document: Any) -> None:
    """The one JSON document of a verb."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def say(text: str = "") -> None:
    """A line of the answer, on stdout."""
    click.echo(plain(text))


def note(text: str) -> None:
    """A line that is not the answer, on stderr."""
    click.echo(plain(text), err=True)


def plain(text: str) -> str:
    """One line without control characters: a name with a line's end must not look like a line of the answer."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout. A column whose name starts with ">" is aligned to the right. In a pipe no line is folded."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False, show_edge=False)
    for name in columns:
        right = name.startswith(">")
        drawn.add_column(Text(name.lstrip(">")), justify="right" if right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(plain(cell)) for cell in row))
    if sys.stdout.isatty():
        _console(sys.stdout, None).print(drawn)
        return
    text = io.StringIO()
    _console(text, _NO_LIMIT).print(drawn)
    click.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _console(stream: TextIO, width: int | None) -> Console:
    """Rich's console, which takes text as it is. width: None for the terminal's."""
    from rich.console import Console

    return Console(file=stream, width=width, highlight=False)


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A bar on stderr with rate and time left, if that is a terminal. what: "verifying"."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich import progress as rich
    from rich.console import Console

    bar = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TextColumn("{task.completed:.0f}/{task.fields[of]}"),
        rich.TextColumn("{task.fields[moved]}"),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None, of="?", moved="")
        started = time.monotonic()

        def tick(done: int, total: int | None, nbytes: int) -> None:
            rate = nbytes / max(time.monotonic() - started, 1e-3)
            moved = f"{arguments.format_size(nbytes)}, {arguments.format_size(rate)}/s" if nbytes else ""
            bar.update(task, completed=done, total=total, of="?" if total is None else total, moved=moved)

        yield tick


def count_of(number: int, noun: str) -> str:
    """A number of things for people: "1 prefix", "2 prefixes"."""
    plural = f"{noun}es" if noun.endswith("x") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def parse_size(text: str) -> int:
    """Bytes of "500", "64K", "1.5GiB", as `arguments.parse_size`; an option's `type`. click.BadParameter for others."""
    try:
        return arguments.parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def parse_age(text: str) -> float:
    """Seconds of "90s", "15m", "12h", "30d", "2w", "0"; an option's `type`. click.BadParameter for others."""
    if text == "0":
        return 0.0
    digits = text.rstrip("smhdw")
    if digits == text and digits.isdecimal():
        raise click.BadParameter(f"{text!r} has no unit: write {text}s, {text}m, {text}h or {text}d")
    try:
        seconds = float(digits) * _SECONDS[text[len(digits) :]]
        if not 0 <= seconds < 2**40:
            raise ValueError
    except (ValueError, KeyError):
        raise click.BadParameter(f"{text!r} is no age: write 90s, 15m, 12h, 30d, 2w") from None
    return seconds


def age(modified: float | None, now: float | None = None) -> str:
    """How long ago: "3 d"; "?" if the store does not say."""
    if modified is None:
        return "?"
    seconds = max(0.0, (time.time() if now is None else now) - modified)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(seconds: float | None) -> str | None:
    """A time for JSON: ISO 8601 in UTC, to the second."""
    return None if seconds is None else datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

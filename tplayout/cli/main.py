"""`tplayout`: the command group. It imports a verb only when that runs, and turns errors into a line and a code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from tplayout import __version__
from tplayout.errors import ConfigError, GeometryError, NotFound, StorageError, StorageErrorKind, TPLayoutError

# Verb -> what `tplayout --help` says of it, so that help imports no verb. Sorted as people meet them.
VERBS: Mapping[str, str] = {
    "ls": "namespaces of a store, or the prefixes of one",
    "du": "what takes the bytes: namespaces, prefixes, ages",
    "inspect": "namespaces in full, or one chunk: ids, cells, digests, statistics, a picture",
    "verify": "check that every object is what it says, and move aside what is not",
    "explain": "would this prompt hit, and if not, why",
    "convert": "per-rank shards, chunk sizes and dtypes into one another",
    "cp": "copy stores, namespaces or prefixes, verified",
    "mv": "copy, and delete from the source what has arrived",
    "gc": "shrink a store, least recently used first",
    "export": "prefixes as one portable file",
    "import": "what export wrote, into a store",
    "doctor": "is this machine, and a store, fit for servers",
}

FINE, NO, WRONG_USE, UNREACHABLE, BUG, INTERRUPTED = 0, 1, 2, 3, 70, 130

EXIT_CODES = """\b
Exit codes:
  0    fine
  1    the answer is "no": damage found, a miss, a difference
  2    wrong use
  3    the store cannot be reached
  70   a fault of tplayout itself
  130  interrupted
"""


class Verbs(click.Group):
    """A group whose commands are the modules `tplayout.cli.<verb>`, each with a click command named `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = import_module(f"tplayout.cli.{module_of(cmd_name)}").command
        assert isinstance(command, click.Command)
        epilog = command.epilog or ""
        if EXIT_CODES not in epilog:
            command.epilog = f"{epilog}\n\n{EXIT_CODES}".lstrip()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if VERBS:
            with formatter.section("Verbs"):
                formatter.write_dl(list(VERBS.items()))

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run and exit."""
        sys.exit(self._run(args, **{**extra, "standalone_mode": False}))

    def _run(self, args: Sequence[str] | None, **extra: Any) -> int:
        """The exit code; what went wrong is one line on stderr, never a traceback."""
        try:
            code = super().main(args, "tplayout", **extra)
            sys.stdout.flush()
            return code if isinstance(code, int) else FINE
        except (click.Abort, KeyboardInterrupt) as error:
            return _stopped(error)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
            return FINE
        except click.ClickException as error:
            error.show()
            return WRONG_USE
        except Exception as error:
            click.echo(f"tplayout: {message_of(error)}", err=True)
            return code_of(error)


def module_of(verb: str) -> str:
    """The module of a verb in tplayout.cli; `import` is a word of the language."""
    return f"{verb}_" if verb == "import" else verb


def code_of(error: BaseException) -> int:
    """The exit code that an error means."""
    if isinstance(error, ConfigError | GeometryError):
        return WRONG_USE
    if isinstance(error, StorageError):
        if error.kind is StorageErrorKind.INVALID_NAME:
            return WRONG_USE
        return NO if isinstance(error, NotFound) else UNREACHABLE
    if isinstance(error, TPLayoutError):
        return NO
    if isinstance(error, PermissionError):
        return UNREACHABLE
    return WRONG_USE if isinstance(error, OSError) else BUG


def message_of(error: BaseException) -> str:
    """One line for people."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        text = f"{error.strerror or text}: {error.filename}" if error.filename else text
    if isinstance(error, TPLayoutError | OSError):
        return text
    return f"a fault of tplayout itself, please report it: {type(error).__name__}: {text}"


def _stopped(error: BaseException) -> int:
    if isinstance(error, click.Abort) and not isinstance(error.__cause__, KeyboardInterrupt):
        click.echo("tplayout: not confirmed, nothing was changed", err=True)
        return NO
    click.echo("tplayout: interrupted", err=True)
    return INTERRUPTED


@click.group(cls=Verbs, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="tplayout", message="%(prog)s %(version)s")
def main() -> None:
    """See what a KV-cache store holds, trust it, move it and prune it.

    URL is a store: file:///dir or a plain path, s3://bucket/prefix, or any other fsspec URL. No verb needs an engine or
    a GPU. Every verb takes --json: one document on stdout, everything else goes to stderr.
    """

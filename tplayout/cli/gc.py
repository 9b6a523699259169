"""`tplayout gc`: shrink a store, least recently used first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tplayout.arguments import format_size
from tplayout.cli.common import (
    confirm,
    count_of,
    dry_run_option,
    emit_json,
    encryption_key_option,
    jobs_option,
    json_option,
    note,
    open_store,
    parse_age,
    parse_size,
    progress,
    say,
    store_options,
    unused_secret_option,
    yes_option,
)

if TYPE_CHECKING:
    from tplayout.admin.prune import Plan

EPILOG = """\b
JSON: {"order": "use" or "age", "bytes_before", "bytes_after", "chunks", "objects",
  "temporaries", "deleted": [name], "unjudged": {namespace: reason}, "limit_met",
  "dry_run"}
"""


@click.command("gc", epilog=EPILOG)
@click.argument("url", metavar="URL")
@click.option("--max-bytes", type=parse_size, metavar="SIZE", help="Shrink the store to this size: 500GiB, 2T.")
@click.option("--max-age", type=parse_age, metavar="AGE", help="Delete what was not used for so long: 12h, 30d.")
@click.option(
    "--keep",
    metavar="PREFIX",
    multiple=True,
    help="Keep this prefix, by the first digits of its last chunk's key, or this namespace. May be repeated.",
)
@click.option(
    "--keep-tokens",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keep the prefix of this prompt: token ids as JSON or text. May be repeated.",
)
@click.option("--salt", help="The cache salt of the prompts in --keep-tokens.")
@click.option("--namespace", metavar="HEX", help="Only this one, by its first digits; --max-bytes is for it then.")
@click.option(
    "--grace",
    type=parse_age,
    default="60s",
    show_default=True,
    metavar="AGE",
    help="Never delete what was written so recently.",
)
@click.option(
    "--temporary-age",
    type=parse_age,
    default="1h",
    show_default=True,
    metavar="AGE",
    help="Remove temporary files that writers which died left so long ago. More than any --timeout of a writer.",
)
@jobs_option
@dry_run_option
@yes_option
@unused_secret_option
@encryption_key_option
@store_options
@json_option
def command(url: str, as_json: bool, **options: Any) -> int:
    """Delete chunks of the store at URL, least recently used first, until the limits are met.

    Tails of prefixes go before their heads. On a local or shared file system servers note when a chunk is used; other
    stores know only when it was written, and the output says which decided. Servers may go on meanwhile: what they
    miss they compute again. Without limits only temporary files of dead writers go. What is encrypted is left alone
    without its key, which alone tells heads from tails.
    """
    from tplayout.admin.prune import Kept, Limits, carry_out, plan
    from tplayout.admin.selection import read_token_file

    limits = Limits(options["max_bytes"], options["max_age"], options["grace"], options["temporary_age"])
    prompts = [read_token_file(path) for path in options["keep_tokens"]]
    kept = Kept([key.lower() for key in options["keep"]], prompts, options["salt"])
    with open_store(url, options["storage_options"], options["timeout"], must_exist=True) as store:
        with progress("reading") as tick:
            key = options["encryption_key"]
            decided = plan(store, limits, kept, options["namespace"], None, options["jobs"], tick, key)
        if not options["dry_run"] and (decided.names or decided.temporaries):
            what = (
                f"{count_of(len(decided.names), 'object')} and {count_of(len(decided.temporaries), 'temporary file')}"
            )
            confirm(f"Delete {what} from {store.url}?", options["yes"])
            with progress("deleting") as tick:
                carry_out(store, decided, tick)
    if as_json:
        emit_json(_document(decided, options["dry_run"]))
    else:
        _show(decided, options)
    return 0 if decided.met else 1


def _document(decided: Plan, dry_run: bool) -> dict[str, Any]:
    return {
        "order": "use" if decided.by_use else "age",
        "bytes_before": decided.before,
        "bytes_after": decided.after,
        "chunks": decided.chunks,
        "objects": len(decided.names),
        "temporaries": len(decided.temporaries),
        "deleted": [*decided.names, *(info.key for info in decided.temporaries)],
        "unjudged": decided.unjudged,
        "limit_met": decided.met,
        "dry_run": dry_run,
    }


def _show(decided: Plan, options: dict[str, Any]) -> None:
    would = "would delete" if options["dry_run"] else "deleted"
    order = (
        "least recently used first"
        if decided.by_use
        else "oldest first: this store does not tell when an object was used"
    )
    if options["dry_run"]:
        for name in decided.names:
            say(name)
    say(f"{would} {count_of(decided.chunks, 'chunk')} ({count_of(len(decided.names), 'object')}), {order}")
    if decided.temporaries:
        say(f"{would} {len(decided.temporaries)} temporary files of writers that died")
    say(f"{format_size(decided.before)} before, {format_size(decided.after)} after")
    for reason in decided.unjudged.values():
        note(f"left alone: {reason}")
    if not decided.met:
        limit = format_size(options["max_bytes"])
        note(f"the limit of {limit} is not met: what is left is kept, too young, or not ours")

"""`tplayout import`: what `tplayout export` wrote, into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tplayout.arguments import format_size
from tplayout.cli.common import (
    count_of,
    dry_run_option,
    emit_json,
    encryption_key_option,
    jobs_option,
    json_option,
    note,
    open_store,
    progress,
    say,
    secret_option,
    store_options,
)
from tplayout.cli.sides import KEYS_RULE, note_unsigned, secrets_of_source

EPILOG = f"""{KEYS_RULE}

\b
JSON: {{"namespace", "objects", "present", "bytes", "damaged": {{object: reason}}, "dry_run"}}
"""


@click.command("import", epilog=EPILOG)
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("url", metavar="URL")
@jobs_option
@dry_run_option
@secret_option
@encryption_key_option
@store_options
@json_option
def command(file: Path, url: str, as_json: bool, **options: Any) -> int:
    """Put what `tplayout export` wrote to FILE into the store at URL.

    Every object is verified; damaged ones are named and left out, and what the store has is skipped.
    """
    from tplayout.admin.bundle import import_bundle
    from tplayout.admin.places import check_directory, path_of
    from tplayout.admin.work import Work

    if (place := path_of(url)) is not None:
        check_directory(place)
    with open_store(url, options["storage_options"], options["timeout"]) as store, progress("importing") as tick:
        work = Work(options["jobs"], tick, options["dry_run"])
        done = import_bundle(file, store, secrets_of_source(options), work)
    note_unsigned(done.keyed, options)
    if as_json:
        emit_json(
            {
                "namespace": done.namespace,
                "objects": done.objects,
                "present": done.present,
                "bytes": done.nbytes,
                "damaged": done.damaged,
                "dry_run": options["dry_run"],
            }
        )
    else:
        would = "would be " if options["dry_run"] else ""
        say(
            f"namespace {done.namespace}: {count_of(done.objects, 'object')} {would}imported "
            f"({format_size(done.nbytes)}), {done.present} were there"
        )
        for reason in done.damaged.values():
            note(f"damaged, not imported: {reason}")
    return 1 if done.damaged else 0

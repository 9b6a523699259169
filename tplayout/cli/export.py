"""`tplayout export`: prefixes as one portable file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tplayout.arguments import format_size
from tplayout.cli.common import (
    count_of,
    dry_run_option,
    emit_json,
    encryption_key_option,
    json_option,
    open_store,
    progress,
    say,
    secret_option,
    store_options,
)
from tplayout.cli.sides import (
    check_kept,
    memory_jobs_option,
    namespace_option,
    secrets_of_source,
    selection_options,
)

if TYPE_CHECKING:
    from tplayout.admin.bundle import Bundled

EPILOG = """\b
JSON: {"file", "namespace", "prefixes", "objects", "bytes", "dry_run"}
"""


@click.command("export", epilog=EPILOG)
@click.argument("url", metavar="URL")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@namespace_option
@selection_options
@memory_jobs_option
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@dry_run_option
@secret_option
@encryption_key_option
@store_options
@json_option
def command(url: str, file: Path, as_json: bool, **options: Any) -> int:
    """Write prefixes of the store at URL to FILE, for `tplayout import` into another store.

    Say which with --prefix or --tokens; without, all prefixes of the namespace. The file is a plain tar archive, and
    holds objects as the store does: token ids and KV in clear, unless they are encrypted; a key or secret that the
    store was written without is refused. Everything is verified; a damaged object stops the export.
    """
    from tplayout.admin.bundle import export_prefixes
    from tplayout.admin.chains import build_index
    from tplayout.admin.namespaces import choose_namespace
    from tplayout.admin.places import check_file
    from tplayout.admin.selection import read_token_file, selected
    from tplayout.admin.work import Work
    from tplayout.errors import ConfigError

    check_file(file)
    if file.exists() and not options["force"] and not options["dry_run"]:
        raise ConfigError(f"{file} is there already: --force replaces it")
    prompts = [read_token_file(path) for path in options["token_files"]]
    with (
        open_store(url, options["storage_options"], options["timeout"], must_exist=True) as store,
        progress("exporting") as tick,
    ):
        origin = choose_namespace(store, options["namespace"], secrets_of_source(options))
        check_kept(origin, options)
        index = build_index(origin)
        keys = selected(index, options["prefixes"], prompts, options["salt"])
        done = export_prefixes(index, keys, file, Work(options["jobs"], tick, options["dry_run"]))
    if as_json:
        emit_json(_document(done, file, options["dry_run"]))
    else:
        would = "would write" if options["dry_run"] else "wrote"
        what = f"{count_of(done.prefixes, 'prefix')}, {count_of(done.objects, 'object')}"
        say(f"{would} {file}: {what}, {format_size(done.nbytes)}")
    return 0


def _document(done: Bundled, file: Path, dry_run: bool) -> dict[str, Any]:
    return {
        "file": str(file),
        "namespace": done.namespace,
        "prefixes": done.prefixes,
        "objects": done.objects,
        "bytes": done.nbytes,
        "dry_run": dry_run,
    }

"""What `tplayout cp` and `tplayout mv` share: their options, the run over namespaces, and the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

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
    progress,
    say,
    secret_option,
    store_options,
)
from tplayout.cli.sides import (
    KEYS_RULE,
    chosen_prefixes,
    destination_key_option,
    destination_options,
    namespace_option,
    note_unsigned,
    open_destination,
    open_source,
    secrets_of_destination,
    secrets_of_source,
    selection_options,
)
from tplayout.errors import FormatError, NotFound

if TYPE_CHECKING:
    from tplayout.admin.catalog import Secrets
    from tplayout.admin.copy import Copied
    from tplayout.admin.namespaces import OpenNamespace
    from tplayout.storage.base import Store

F = TypeVar("F", bound=Callable[..., Any])

EPILOG = f"""{KEYS_RULE}

\b
JSON: {{"namespaces": {{name: {{"copied", "present", "removed", "bytes", "damaged":
  {{object: reason}}}}}}, "dry_run"}}
"""


def copy_options(function: F) -> F:
    """SRC, DST and every option that both verbs have."""
    for option in (
        json_option,
        destination_options,
        store_options,
        secret_option,
        destination_key_option,
        encryption_key_option,
        dry_run_option,
        jobs_option,
        selection_options,
        namespace_option,
        click.argument("destination", metavar="DST"),
        click.argument("source", metavar="SRC"),
    ):
        function = option(function)
    return function


def run(source: str, destination: str, options: dict[str, Any], move: bool) -> int:
    """Copy or move, print the answer, return the exit code."""
    from tplayout.admin.places import check_separate

    check_separate(source, destination)
    with (
        open_source(source, destination, options) as origin,
        open_destination(source, destination, options) as target,
    ):
        if move and not options["dry_run"]:
            confirm(f"Move to {target.url}, and delete from {origin.url} what has arrived?", options["yes"])
        reports = _run(origin, target, options, move)
    if options["as_json"]:
        emit_json(
            {
                "namespaces": {name: _document(report) for name, report in reports.items()},
                "dry_run": options["dry_run"],
            }
        )
    else:
        _show(reports, options["dry_run"], move)
    return 0 if all(report.complete for report in reports.values()) else 1


def _run(origin: Store, target: Store, options: dict[str, Any], move: bool) -> dict[str, Copied]:
    from tplayout.admin.copy import copy_namespace, move_namespace
    from tplayout.admin.namespaces import choose_namespace
    from tplayout.admin.progress import Parts
    from tplayout.admin.selection import read_token_file
    from tplayout.admin.work import Work

    source, own = secrets_of_source(options), secrets_of_destination(options)
    prompts = [read_token_file(path) for path in options["token_files"]]
    reports: dict[str, Copied] = {}
    if options["namespace"] or options["prefixes"] or prompts:
        chosen = [choose_namespace(origin, options["namespace"], source)]
    else:
        chosen = _sound_namespaces(origin, source, reports)
    if not chosen and not reports:
        raise NotFound(f"{origin.url}: no namespace is stored here")
    with progress("moving" if move else "copying") as whole:
        parts = Parts(whole)
        for namespace in chosen:
            work = Work(options["jobs"], parts.part(), options["dry_run"])
            keys, index = chosen_prefixes(namespace, prompts, options)
            if move:
                report = move_namespace(namespace, target, own, keys, index, work)
            else:
                again = options["recheck"]
                report = copy_namespace(namespace, target, own, keys, index, work, again)
            reports[namespace.name] = report
    note_unsigned(all(namespace.document.storage.key_id is not None for namespace in chosen), options)
    return reports


def _sound_namespaces(origin: Store, secrets: Secrets, reports: dict[str, Copied]) -> list[OpenNamespace]:
    """The namespaces of a whole store. One whose document is damaged is reported so, and keeps no other back."""
    from tplayout.admin.copy import Copied
    from tplayout.admin.namespaces import names, open_namespace
    from tplayout.format.keys import namespace_object

    found = []
    for name in names(origin):
        try:
            found.append(open_namespace(origin, name, secrets))
        except NotFound:  # moved or deleted since it was listed
            continue
        except FormatError as error:
            reports[name] = Copied(damaged={namespace_object(name): str(error)})
    return found


def _document(report: Copied) -> dict[str, Any]:
    return {
        "copied": report.copied,
        "present": report.present,
        "removed": report.removed,
        "bytes": report.nbytes,
        "damaged": report.damaged,
    }


def _show(reports: dict[str, Copied], dry_run: bool, move: bool) -> None:
    would = "would be " if dry_run else ""
    for name, report in reports.items():
        moved = f", {report.removed} {would}removed from the source" if move else ""
        copied = f"{count_of(report.copied, 'object')} {would}copied ({format_size(report.nbytes)})"
        say(f"{name}: {copied}, {report.present} were there{moved}")
        for reason in report.damaged.values():
            note(f"damaged, {'left where it is' if move else 'not copied'}: {reason}")

"""`tplayout verify`: is every object what it says it is; and moving aside those that are not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from tplayout.admin.catalog import Secrets
from tplayout.admin.check import Kind
from tplayout.admin.quarantine import ON_REQUEST, Move, plan, quarantine
from tplayout.admin.verify import Report, verify_store
from tplayout.arguments import format_size
from tplayout.cli.common import (
    check_can_ask,
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
    secret_option,
    store_options,
    yes_option,
)
from tplayout.errors import ConfigError
from tplayout.storage.base import TEMPORARY_AGE_S, Store

_EPILOG = """\b
JSON:
  url, deep              what was verified, and whether every byte was read
  sound                  the answer, and the exit code: false if damage is left, or what is
                         unauthenticated or unencrypted; null if nothing is stored there
  namespaces, checked,   how many, bytes read; skipped: objects of namespaces without
  bytes, skipped         a readable namespace.json
  undecrypted            encrypted objects of which only the stored bytes were compared
                         with their digests, for want of the key
  findings               [{kind, damage, object, reason, detail, fix, bytes, home, objects}]
    kind                 damaged truncated misnamed foreign unreadable unidentified,
                         with a secret or key: unauthenticated unencrypted (namespaces
                         without), and without damage: temporary unreachable
    damage               whether it makes the answer false
    fix                  the command that mends it
    home                 misnamed: the name under which it is sound
    objects              unreachable: all of them (object is the first)
  quarantined            [{object, to, bytes, why}]; why: it was left where it is

\b
Examples:
  tplayout verify s3://bucket/kv --journal verify.log --max-rate 200M
  tplayout verify /var/cache/kv --quarantine --dry-run
"""


@click.command(epilog=_EPILOG)
@click.argument("url")
@click.option("--namespace", metavar="HEX", help="Only this namespace (its first digits).")
@click.option("--object", "names", metavar="NAME", multiple=True, help="Only this object. May be repeated.")
@click.option("--quick", is_flag=True, help="Check sizes, headers and keys only; do not read the KV.")
@click.option("--max-rate", type=parse_size, metavar="SIZE", help="Bytes a second to read at most, as 50M.")
@click.option("--journal", metavar="FILE", help="A local file that lets an interrupted run go on where it was.")
@click.option(
    "--temporary-age",
    type=parse_age,
    default=f"{TEMPORARY_AGE_S:g}s",
    show_default=True,
    metavar="AGE",
    help="How old a temporary file is that no living writer has.",
)
@click.option(
    "--quarantine",
    "move",
    is_flag=True,
    help="Move damaged objects to tplayout-quarantine/ in the store, misnamed ones to their right name if it is free.",
)
@click.option(
    "--also",
    type=click.Choice([kind.value for kind in ON_REQUEST]),
    multiple=True,
    help="With --quarantine: what else to move (temporaries are deleted). Objects named by --object always are.",
)
@jobs_option
@secret_option
@encryption_key_option
@dry_run_option
@yes_option
@store_options
@json_option
def command(url: str, quick: bool, move: bool, as_json: bool, **options: Any) -> int:
    """Check every object of the store at URL: is it what its name says, complete and undamaged?

    Every byte is read and compared with its digest (--quick: sizes, headers and keys). Damage makes the exit code 1.
    Also told, and no damage: temporary files of writers that died, and chunks that no server can use because the prefix
    before them has a gap. Each comes with the command that mends it. Nothing is changed without --quarantine. Encrypted
    objects are opened where the key is given; else what is stored is compared with its digests, which finds damage, but
    no forgery. Who gives a secret or a key is told which namespaces were written without; they make the exit code 1,
    and --quarantine leaves them where they are.
    """
    if (options["dry_run"] or options["also"]) and not move:
        raise ConfigError("--dry-run and --also go with --quarantine: nothing else changes anything")
    if move and not options["dry_run"]:
        # Now, not after hours of reading.
        check_can_ask("Move what is damaged to tplayout-quarantine/?", options["yes"])
    deep, secrets = not quick, Secrets(options["secret"], options["encryption_key"])
    with open_store(url, options["storage_options"], options["timeout"], must_exist=True) as store:
        with progress("verifying") as tick:
            report = verify_store(
                store,
                secrets=secrets,
                deep=deep,
                namespace=options["namespace"],
                only=options["names"],
                jobs=options["jobs"],
                max_rate=options["max_rate"],
                temporary_age=options["temporary_age"],
                journal_path=options["journal"],
                progress=tick,
            )
        _note_absence(store.url, report)
        if not as_json:
            _print_findings(report, deep)
        moves = _move(store, report, secrets, deep, options) if move else []
        moved = {done.name for done in moves if not done.left}
        remaining = [finding for finding in report.damage if finding.name not in moved]
        if as_json:
            sound = not remaining if _found_something(report) else None
            emit_json(_document(store.url, report, sound, moves, deep))
        else:
            _print_moves(moves)
            if moves and report.damage and not remaining:
                say("nothing of what was found is left in its place")
    return 1 if remaining else 0


def _found_something(report: Report) -> bool:
    return bool(report.namespaces or report.findings)


def _note_absence(url: str, report: Report) -> None:
    """Say that a store may be the wrong one."""
    if not _found_something(report):
        note(f"nothing is stored in {url}, and nothing was checked: is the URL right?")
    elif not report.namespaces:
        note(f"no namespace is stored in {url}: is the URL right? What lies there may be somebody's")


def _move(store: Store, report: Report, secrets: Secrets, deep: bool, options: dict[str, Any]) -> list[Move]:
    """Move what was found to quarantine, as far as the options and the user say so."""
    chosen = plan(report.findings, ON_REQUEST if options["names"] else [Kind(kind) for kind in options["also"]])
    if chosen and options["dry_run"]:
        note(f"would move {_counted(chosen)} to tplayout-quarantine/ (temporaries are deleted)")
    if not chosen or options["dry_run"]:
        return []
    confirm(f"Move {_counted(chosen)} to tplayout-quarantine/ in {store.url}?", options["yes"])
    with progress("moving") as tick:
        return quarantine(store, chosen, secrets=secrets, deep=deep, jobs=options["jobs"], progress=tick)


def _counted(findings: list[Any]) -> str:
    return count_of(sum(len(finding.objects) or 1 for finding in findings), "object")


def _print_findings(report: Report, deep: bool) -> None:
    for finding in report.findings:
        reason = "" if finding.reason == finding.kind else f"{finding.reason}: "
        say(f"{finding.kind.value:<12} {finding.name}")
        say(f"    {reason}{finding.detail}")
        say(f"    fix: {finding.fix}")
    depth = "every byte" if deep else "sizes, headers and keys"
    where = count_of(report.namespaces, "namespace")
    say(f"{count_of(report.checked, 'object')} in {where} checked ({depth}), {format_size(report.nbytes)} read")
    if report.sealed:
        compared = "the stored bytes" if deep else "size and header"
        say(
            f"{count_of(report.sealed, 'encrypted object')} of these: only {compared} checked, nothing authenticated, "
            "for want of the key (--encryption-key-file)"
        )
    kinds = Counter(finding.kind.value for finding in report.damage)
    if not _found_something(report):
        say("nothing to check")
    elif kinds:
        say("NOT sound: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    else:
        limit = ", as far as can be told without the key" if report.sealed else ""
        say(f"sound{limit}" + (": what is listed above is harmless" if report.notes else ""))


def _print_moves(moves: list[Move]) -> None:
    for done in moves:
        result = f"left: {done.why}" if done.left else "deleted" if done.to is None else f"-> {done.to}"
        say(f"{done.name} {result}")


def _document(url: str, report: Report, sound: bool | None, moves: list[Move], deep: bool) -> dict[str, Any]:
    return {
        "url": url,
        "deep": deep,
        "sound": sound,
        "namespaces": report.namespaces,
        "checked": report.checked,
        "bytes": report.nbytes,
        "skipped": report.skipped,
        "undecrypted": report.sealed,
        "findings": [
            {
                "kind": finding.kind.value,
                "damage": finding.is_damage,
                "object": finding.name,
                "reason": str(finding.reason),
                "detail": finding.detail,
                "fix": finding.fix,
                "bytes": finding.nbytes,
                "home": finding.home,
                "objects": list(finding.objects),
            }
            for finding in report.findings
        ],
        "quarantined": [
            {"object": done.name, "to": done.to, "bytes": done.nbytes, "why": done.why or None} for done in moves
        ],
    }

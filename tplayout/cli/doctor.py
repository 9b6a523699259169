"""`tplayout doctor`: is this machine, and this store, fit for servers."""

from __future__ import annotations

from typing import Any

import click

from tplayout.admin.diagnosis import Finding, Level, environment, key_files
from tplayout.admin.store_check import LARGE_BYTES, Unreachable, round_trip, settings
from tplayout.arguments import format_size
from tplayout.cli.common import emit_json, json_option, open_store, parse_size, say, store_options
from tplayout.cli.main import NO, UNREACHABLE

_EPILOG = """\b
JSON:
  url                    null without one
  ok                     nothing failed: the answer, and the exit code
  findings               [{topic, level, text, remedy, seconds, bytes_per_second}]
                         level: ok warn fail; remedy: null if all is well

\b
Examples:
  tplayout doctor
  tplayout doctor s3://bucket/kv --storage-option endpoint_url=https://s3.example.org
"""


@click.command(epilog=_EPILOG)
@click.argument("url", required=False)
@click.option("--no-write", is_flag=True, help="Only look: put and delete nothing in the store.")
@click.option(
    "--size",
    "large_bytes",
    type=parse_size,
    default=f"{LARGE_BYTES >> 20}M",
    show_default=True,
    metavar="SIZE",
    help="Size of the object whose rates are measured.",
)
@click.option(
    "--secret-key-file", "secret_file", metavar="FILE", help="Check that the file holds a secret; tell its id."
)
@click.option("--encryption-key-file", "key_file", metavar="FILE", help="Check that the file holds a key; tell its id.")
@store_options
@json_option
def command(
    url: str | None,
    no_write: bool,
    large_bytes: int,
    secret_file: str | None,
    key_file: str | None,
    storage_options: dict[str, Any],
    timeout: float,
    as_json: bool,
) -> int:
    """Check this machine, and with URL a store: what works, how fast, and the remedy for what does not.

    Looks at versions, vLLM and the plug-in, shared memory and limits; of a store at rights, S3 settings that bite,
    clocks, and writes, reads, lists and deletes small objects under tplayout-doctor/ (not with --no-write).
    """
    findings: list[Finding] = []
    unreachable = False

    def add(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            _print(finding)

    for finding in [*environment(), *key_files(secret_file, key_file)]:
        add(finding)
    shown = None
    if url is not None:
        with open_store(url, storage_options, timeout) as store:
            shown = store.url
            for finding in settings(url, storage_options):
                add(finding)
            try:
                for finding in round_trip(store, not no_write, large_bytes):
                    add(finding)
            except Unreachable as error:
                add(error.finding)
                unreachable = True
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    if as_json:
        emit_json({"url": shown, "ok": not failed, "findings": [_json(finding) for finding in findings]})
    else:
        warned = sum(finding.level is Level.WARN for finding in findings)
        say(f"{len(failed)} failed, {warned} warnings, {len(findings) - warned - len(failed)} fine")
    return UNREACHABLE if unreachable else NO if failed else 0


def _print(finding: Finding) -> None:
    timed = "" if finding.seconds is None else f" in {finding.seconds * 1000:.1f} ms"
    rate = "" if finding.bytes_per_second is None else f", {format_size(finding.bytes_per_second)}/s"
    say(f"{finding.level.value:<5} {finding.topic:<16} {finding.text}{timed}{rate}")
    if finding.remedy:
        say(f"{'':<22} remedy: {finding.remedy}")


def _json(finding: Finding) -> dict[str, Any]:
    return {
        "topic": finding.topic,
        "level": finding.level.value,
        "text": finding.text,
        "remedy": finding.remedy or None,
        "seconds": finding.seconds,
        "bytes_per_second": finding.bytes_per_second,
    }

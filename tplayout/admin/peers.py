"""Other caches' files of one prompt into a namespace, and a namespace's prompt into vLLM's tier.

The formats hold no token ids, so each run converts one prompt, whose tokens the user gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tplayout.admin.catalog import NO_SECRETS, Secrets
from tplayout.admin.chains import build_index
from tplayout.admin.convert import Report
from tplayout.admin.namespaces import OpenNamespace, begin_namespace
from tplayout.admin.pages import PagedSource, check_statement
from tplayout.admin.selection import prompt_chunks
from tplayout.admin.transfer import read_prefix, store_prefix
from tplayout.admin.transformers_file import TransformersFile, TransformersWriter, check_geometry, is_there
from tplayout.admin.vllm_tier import Rows, Tier, TierWriter, write_config
from tplayout.admin.work import SIMPLY, Work
from tplayout.errors import ConfigError
from tplayout.format.identity import Identity
from tplayout.format.keys import chain
from tplayout.storage.base import Store


def import_prompt(
    source: PagedSource,
    tokens: Sequence[int],
    identity: Identity,
    store: Store,
    stated: str,
    unchecked: bool = False,
    model: str = "",
    secrets: Secrets = NO_SECRETS,
    work: Work = SIMPLY,
) -> Report:
    """Store what a source holds of a prompt. stated: what the user said of the files, for messages.

    unchecked: believe that without looking at the values. Raises ConfigError if the values do not fit.
    """
    if not unchecked:
        check_statement(source, tokens, stated)
    target = begin_namespace(store, identity, model, secrets, dry_run=work.dry_run)
    chunks = chain(target.digest, list(tokens[: source.tokens]), target.chunk_tokens)
    report = Report(prefixes=1, rest=source.tokens % target.chunk_tokens, namespace=target.name)
    report.tally.add(store_prefix(source, chunks, target, work))
    return report


def tier_to_tier(
    source: PagedSource,
    tokens: Sequence[int],
    target: Tier,
    rows: Rows,
    hashes: Sequence[bytes],
    stated: str,
    unchecked: bool = False,
    work: Work = SIMPLY,
) -> Report:
    """Write what a source holds of a prompt as files of another server. Holds one file's tokens at a time."""
    if not unchecked:
        check_statement(source, tokens, stated)
    count = source.tokens // target.file_tokens
    report = Report(prefixes=1, rest=source.tokens % target.file_tokens)
    if work.dry_run:
        report.files_written = count
        return report
    writer = TierWriter(target, rows, hashes[:count])
    write_config(target)
    group = rows.group
    shape = (group.heads, len(group.layers), *group.cell_shape(target.file_tokens))
    bits = np.empty(shape, f"u{group.element_bytes}")
    for number in range(count):
        span = range(number * target.file_tokens, (number + 1) * target.file_tokens)
        source.fill(0, span, bits)
        writer.take(0, span, bits)
        work.progress(number + 1, count, (number + 1) * rows.nbytes)
    report.files_written, report.files_present = writer.written, writer.present
    return report


def store_to_tier(
    origin: OpenNamespace,
    tokens: Sequence[int],
    target: Tier,
    rows: Rows,
    hashes: Sequence[bytes],
    work: Work = SIMPLY,
) -> Report:
    """Write what a namespace holds of a prompt as files of vLLM's tier, whose files must fit into chunks evenly.

    Raises ConfigError if they do not, NotFound if nothing of the prompt is stored.
    """
    if origin.chunk_tokens % target.file_tokens:
        raise ConfigError(
            f"chunks of {origin.chunk_tokens} tokens do not hold whole files of {target.file_tokens}: convert to "
            "--chunk-tokens of a multiple first"
        )
    chunks = prompt_chunks(build_index(origin), tokens)
    report = Report(prefixes=1, namespace=origin.name)
    if work.dry_run:
        report.files_written = len(chunks) * origin.chunk_tokens // target.file_tokens
        return report
    writer = TierWriter(target, rows, hashes)
    write_config(target)
    report.tally = read_prefix(origin, chunks, writer, replace(work, jobs=1))
    report.files_written, report.files_present = writer.written, writer.present
    return report


def store_to_transformers(
    origin: OpenNamespace,
    tokens: Sequence[int],
    file: Path,
    work: Work = SIMPLY,
) -> Report:
    """Write what a namespace holds of a prompt as a file for transformers. Damaged or missing objects: no file.

    Raises NotFound if nothing of the prompt is stored, GeometryError for a model whose KV such a file cannot hold.
    """
    check_geometry(origin.identity.geometry)
    chunks = prompt_chunks(build_index(origin), tokens)
    report = Report(prefixes=1, namespace=origin.name)
    stored = [token for chunk in chunks for token in chunk.tokens]
    if is_there(file, origin.identity, origin.document.model, stored):
        report.files_present = 1
        return report
    report.files_written = 1
    if work.dry_run:
        return report
    writer = TransformersWriter(file, origin.identity, origin.document.model, stored)
    try:
        report.tally = read_prefix(origin, chunks, writer, work)
        if report.tally.damaged or report.tally.absent:
            report.files_written = 0
            gone = f"{report.tally.absent} objects (sliding windows?) are not stored any more"
            report.skipped[str(file)] = "damaged objects" if report.tally.damaged else gone
        else:
            writer.publish()
    finally:
        writer.discard()
    return report


def import_transformers(
    file: Path,
    store: Store,
    identity: Identity | None = None,
    model: str = "",
    secrets: Secrets = NO_SECRETS,
    work: Work = SIMPLY,
) -> Report:
    """A transformers file into a store. identity: where the file holds none."""
    with TransformersFile(file, identity) as source:
        target = begin_namespace(store, source.identity, model or source.model, secrets, dry_run=work.dry_run)
        chunks = chain(target.digest, source.tokens, target.chunk_tokens)
        report = Report(prefixes=1, rest=len(source.tokens) % target.chunk_tokens, namespace=target.name)
        report.tally.add(store_prefix(source, chunks, target, work))
        return report

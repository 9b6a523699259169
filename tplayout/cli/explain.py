"""`tplayout explain`: would this prompt hit, and if not, why."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from tplayout.admin.catalog import Secrets
from tplayout.admin.causes import Cause
from tplayout.admin.explain import MAX_SCAN, ChunkState, Explanation, Prompt, explain
from tplayout.admin.selection import read_token_file
from tplayout.admin.wanted import tokens_of_text, wanted_identity
from tplayout.cli.common import (
    count_of,
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
    table,
)
from tplayout.cli.describe import SHORT
from tplayout.errors import ConfigError
from tplayout.format.encryption_key import EncryptionKey

_EPILOG = """\b
JSON:
  url, namespace, exists   the namespace of the model as a server would have it
  hit                      every full chunk would hit: the answer, and the exit code
  prompt_tokens, chunk_tokens, hit_tokens, hit_chunks
  chunks                   [{index, start_token, key, state, detail, objects}]
                           state: hit missing damaged, or refused: stored, but not with
                           this secret or encryption key
  reasons                  [{reason, text, namespace, field, ours, theirs}], the most
                           telling first; reason is one of
                             empty-store too-short dtype kv-dtype weights chunk-size
                             quantization scales geometry config secret
                             encryption-key
                             damaged-namespace salt first-token diverges not-stored
                             gap damaged window
  nearby                   [{namespace, model, hit_chunks, differs_in}]: other namespaces

\b
Examples:
  tplayout explain s3://bucket/kv --model ./my-model --text prompt.txt
  tplayout explain /var/cache/kv --model ./my-model --dtype float16 --tokens ids.json
"""

_OTHERS = 5


def _overrides(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        overrides = json.loads(value)
    except ValueError:
        raise click.BadParameter("not JSON") from None
    if not isinstance(overrides, dict):
        raise click.BadParameter("must be a JSON object")
    return overrides


@click.command(epilog=_EPILOG)
@click.argument("url")
@click.option("--model", required=True, metavar="PATH", help="Model directory, its config.json, or a namespace.json.")
@click.option("--tokens", "token_file", metavar="FILE", help="The prompt as token ids: JSON, or numbers as text.")
@click.option("--text", "text_file", metavar="FILE", help="The prompt as text, for the model's tokenizer; - is stdin.")
@click.option("--no-special-tokens", is_flag=True, help="With --text: add no BOS and the like.")
@click.option("--salt", metavar="TEXT", help="The request's cache salt.")
@click.option("--dtype", default="auto", show_default=True, help="The server's --dtype.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="The server's --kv-cache-dtype.")
@click.option("--chunk-tokens", type=click.IntRange(1, 65536), help="The server's chunk_tokens, if it sets one.")
@click.option("--weights-label", help="The server's weights_label, if it sets one.")
@click.option("--load-format", default="auto", show_default=True, help="The server's --load-format.")
@click.option("--hf-overrides", metavar="JSON", callback=_overrides, help="The server's --hf-overrides.")
@click.option("--quick", is_flag=True, help="Check sizes, headers and keys of the chunks only.")
@click.option(
    "--max-scan",
    type=click.IntRange(0),
    default=MAX_SCAN,
    show_default=True,
    help="Look into so many stored chunks, the newest first, for a prompt that begins alike.",
)
@jobs_option
@secret_option
@encryption_key_option
@store_options
@json_option
def command(
    url: str,
    model: str,
    token_file: str | None,
    text_file: str | None,
    no_special_tokens: bool,
    salt: str | None,
    dtype: str,
    kv_cache_dtype: str,
    chunk_tokens: int | None,
    weights_label: str | None,
    load_format: str,
    hf_overrides: dict[str, Any] | None,
    quick: bool,
    max_scan: int,
    jobs: int,
    secret: bytes | None,
    encryption_key: EncryptionKey | None,
    storage_options: dict[str, Any],
    timeout: float,
    as_json: bool,
) -> int:
    """Tell whether a prompt would hit in the store at URL, chunk by chunk, and if it misses, why.

    Give the settings that the server is started with; the exit code is 1 unless every full chunk of the prompt hits.
    With a config.json alone the weights are not compared. Requests with an adapter or with images cannot be explained.
    """
    if (token_file is None) == (text_file is None):
        raise ConfigError("give the prompt either as --tokens FILE or as --text FILE")
    wanted = wanted_identity(
        model,
        kv_dtype=kv_cache_dtype,
        compute_dtype=dtype,
        chunk_tokens=chunk_tokens,
        weights_label=weights_label,
        overrides=hf_overrides,
        load_format=load_format,
    )
    if token_file is not None:
        tokens = read_token_file(Path(token_file))
    else:
        tokens = tokens_of_text(model, _text(str(text_file)), not no_special_tokens)
    prompt = Prompt(tokens, salt)
    with open_store(url, storage_options, timeout, must_exist=True) as store, progress("looking") as tick:
        answer = explain(
            store,
            wanted,
            prompt,
            secrets=Secrets(secret, encryption_key),
            deep=not quick,
            jobs=jobs,
            max_scan=max_scan,
            progress=tick,
        )
    if as_json:
        emit_json({"url": store.url, **_document(answer)})
    else:
        if not wanted.weights_known:
            note("the weights are not compared: give the model's directory, or --weights-label")
        _print(store.url, answer)
    return 0 if answer.is_hit else 1


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is not UTF-8: {error}") from None


def _cause_json(cause: Cause) -> dict[str, Any]:
    return {
        "reason": cause.why.value,
        "text": cause.text,
        "namespace": cause.namespace,
        "field": cause.field,
        "ours": cause.ours,
        "theirs": cause.theirs,
    }


def _document(answer: Explanation) -> dict[str, Any]:
    size = answer.identity.geometry.chunk_tokens
    return {
        "namespace": answer.identity.namespace,
        "exists": answer.exists,
        "hit": answer.is_hit,
        "prompt_tokens": answer.tokens,
        "chunk_tokens": size,
        "hit_tokens": answer.hit_tokens,
        "hit_chunks": answer.hit_chunks,
        "chunks": [
            {
                "index": state.chunk.index,
                "start_token": state.chunk.index * size,
                "key": state.chunk.key.hex(),
                "state": state.state,
                "detail": state.detail or None,
                "objects": list(state.objects),
            }
            for state in answer.chunks
        ],
        "reasons": [_cause_json(cause) for cause in answer.causes],
        "nearby": [
            {
                "namespace": near.namespace,
                "model": near.model,
                "hit_chunks": near.hit_chunks,
                "differs_in": [_cause_json(cause) for cause in near.causes],
            }
            for near in answer.nearby
        ],
    }


def _print(url: str, answer: Explanation) -> None:
    size = answer.identity.geometry.chunk_tokens
    rest = answer.tokens - len(answer.chunks) * size
    behind = f", and {rest} tokens behind them, which are never stored" if rest else ""
    say(f"prompt     {answer.tokens} tokens: {count_of(len(answer.chunks), 'chunk')} of {size}{behind}")
    say(f"namespace  {answer.identity.namespace}{'' if answer.exists else ' is not in this store'}")
    if answer.exists and answer.chunks:
        say()
        table([">chunks", ">tokens", "state", "last key", ""], _rows(answer.chunks, size))
        say()
    say(f"would hit {answer.hit_tokens} of {answer.tokens} tokens in {url}")
    for cause in answer.causes:
        place = "" if cause.namespace in (None, answer.identity.namespace) else f" (namespace {cause.namespace})"
        say(f"  because  {cause.text}{place}")
    telling = [near for near in answer.nearby if not answer.exists or near.hit_chunks > answer.hit_chunks]
    for near in telling[:_OTHERS]:
        differs = "; ".join(cause.text for cause in near.causes)
        hits = f", where this prompt would hit {near.hit_chunks} chunks" if near.hit_chunks else ""
        say(f"  there is {near.namespace} {near.model}{hits}: {differs}")


def _rows(states: list[ChunkState], size: int) -> list[list[str]]:
    """A row for each run of chunks of which the same is to be said."""
    rows = []
    for _, group in groupby(states, key=lambda state: (state.state, state.detail)):
        run = list(group)
        first, last = run[0].chunk.index, run[-1].chunk.index
        numbers = str(first) if first == last else f"{first}-{last}"
        tokens = f"{first * size}..{(last + 1) * size}"
        rows.append([numbers, tokens, run[0].state, run[-1].chunk.key.hex()[:SHORT], run[0].detail])
    return rows

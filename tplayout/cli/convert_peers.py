"""What `tplayout convert` does with other caches' files: which they are, what the user states, what is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tplayout.admin.work import Work
from tplayout.cli.sides import (
    is_local,
    local_path,
    open_destination,
    open_source,
    secrets_of_destination,
    secrets_of_source,
)
from tplayout.errors import ConfigError

if TYPE_CHECKING:
    from tplayout.admin.convert import Report
    from tplayout.admin.pages import PagedSource
    from tplayout.admin.vllm_tier import Rows, Tier
    from tplayout.format.geometry import Group
    from tplayout.format.identity import Identity

F = TypeVar("F", bound=Callable[..., Any])

PAGE_ORDERS = ("nhd", "hnd", "split-nhd", "split-hnd", "cpu")
HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def peer_options(function: F) -> F:
    """What other caches' files do not tell about themselves."""
    for option in (
        click.option("--unchecked", is_flag=True, help="Believe what is stated without a look at the values."),
        click.option("--hash-seed", metavar="TEXT", help="PYTHONHASHSEED of the vLLM server, if it had one."),
        click.option(
            "--hash-algo",
            type=click.Choice(HASH_ALGORITHMS),
            default="sha256",
            show_default=True,
            help="The vLLM server's --prefix-caching-hash-algo.",
        ),
        click.option("--page-order", type=click.Choice(PAGE_ORDERS), help="Order of the engine's pages (tier)."),
        click.option(
            "--engine-chunk-tokens",
            type=click.IntRange(1),
            default=256,
            show_default=True,
            help="LMCache's chunk size.",
        ),
        click.option(
            "--engine-backend",
            type=click.Choice(("gpu", "cpu")),
            help="Of the engine (ExampleConnector, LMCache): what a slot of its pages is.",
        ),
        click.option("--engine-block-size", type=click.IntRange(1), help="Tokens of the engine's block."),
        click.option("--engine-tp", type=click.IntRange(1, 4096), help="TP size of the engine that wrote SRC."),
        click.option(
            "--transformers", is_flag=True, help="Write DST, a file with the prompt's KV for Hugging Face transformers."
        ),
        click.option(
            "--engine-config",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Write files for vLLM's tier into DST: the config.json that the server which shall read them wrote.",
        ),
    ):
        function = option(function)
    return function


def kind_of(source: str) -> str | None:
    """vllm-tier, lmcache, example-connector, or None: what other cache's files SRC holds."""
    if not is_local(source):
        return None
    from tplayout.admin.example_connector import is_example_directory
    from tplayout.admin.lmcache_files import is_lmcache_directory
    from tplayout.admin.vllm_tier import find_tiers

    place = local_path(source)
    if find_tiers(place):
        return "vllm-tier"
    if is_lmcache_directory(place):
        return "lmcache"
    return "example-connector" if is_example_directory(place) else None


def convert_peer(
    kind: str, source: str, destination: str, options: dict[str, Any], work: Work
) -> tuple[tuple[str, str], Report]:
    """Another cache's files into a store, or, with --tp, vLLM's tier into the same for another TP size."""
    from tplayout.admin.pages import only_group
    from tplayout.admin.peers import import_prompt

    tokens = _prompt(options)
    identity = _identity(options)
    group = only_group(identity.geometry)
    if kind == "vllm-tier":
        tier, rows, pages = _open_tier(source, group, tokens, options)
        stated = f"TP size {rows.tp_size} and page order {rows.order}"
        if options["tp"] is not None:
            report = _to_tp(tier, rows, pages, destination, tokens, stated, options, work)
            return ("vllm-tier", "vllm-tier"), report
    else:
        pages, stated = _open_slots(kind, source, group, tokens, options)
    model = options["model"].resolve().name
    with open_destination(source, destination, options) as store:
        report = import_prompt(
            pages,
            tokens,
            identity,
            store,
            stated,
            options["unchecked"],
            model,
            secrets_of_destination(options),
            work,
        )
    return (kind, "store"), report


def convert_to_tier(source: str, destination: str, options: dict[str, Any], work: Work) -> Report:
    """A prompt of a store as files of vLLM's tier, for the server that wrote --engine-config."""
    from tplayout.admin.namespaces import choose_namespace
    from tplayout.admin.pages import only_group
    from tplayout.admin.peers import store_to_tier
    from tplayout.admin.vllm_tier import open_tier, rows_of

    tokens = _prompt(options)
    tier = replace(open_tier(options["engine_config"]), root=_directory(destination))
    with open_source(source, destination, options) as store:
        origin = choose_namespace(store, options["namespace"], secrets_of_source(options))
        group = only_group(origin.identity.geometry)
        rows = rows_of(tier, group, options["engine_tp"], options["page_order"])
        hashes = tier.hashes(tokens, options["hash_algo"], options["hash_seed"])
        return store_to_tier(origin, tokens, tier, rows, hashes, work)


def convert_to_transformers(source: str, destination: str, options: dict[str, Any], work: Work) -> Report:
    """A prompt of a store as a file for transformers."""
    from tplayout.admin.namespaces import choose_namespace
    from tplayout.admin.peers import store_to_transformers
    from tplayout.admin.places import check_file

    tokens = _prompt(options)
    if not is_local(destination):
        raise ConfigError(f"DST {destination}: a file for transformers is a local one")
    check_file(local_path(destination))
    with open_source(source, destination, options) as store:
        origin = choose_namespace(store, options["namespace"], secrets_of_source(options))
        file = local_path(destination)
        return store_to_transformers(origin, tokens, file, work)


def convert_transformers(source: str, destination: str, options: dict[str, Any], work: Work) -> Report:
    """A file of transformers' tensors into a store. --model: where the file holds no identity."""
    from tplayout.admin.local_files import is_safetensors
    from tplayout.admin.peers import import_transformers
    from tplayout.admin.shards import is_shard_file

    if not is_safetensors(local_path(source)):
        raise ConfigError(
            f"{source} is a file, and no safetensors file: SRC is a directory, or a file with a prompt's KV for "
            "transformers; `tplayout import` reads what export wrote"
        )
    if is_shard_file(local_path(source)):
        raise ConfigError(f"{source} is one rank's shard: name the directory that holds all of them")
    identity = None if options["model"] is None else _identity(options)
    model = "" if options["model"] is None else options["model"].resolve().name
    with open_destination(source, destination, options) as store:
        return import_transformers(
            local_path(source),
            store,
            identity,
            model,
            secrets_of_destination(options),
            work,
        )


def _open_slots(
    kind: str, source: str, group: Group, tokens: list[int], options: dict[str, Any]
) -> tuple[PagedSource, str]:
    """Files of raw slots, and what was stated of them."""
    from tplayout.admin import example_connector, lmcache_files

    block, backend = options["engine_block_size"], options["engine_backend"]
    if block is None or backend is None:
        raise ConfigError("these files do not tell --engine-block-size and --engine-backend: state both")
    if options["tp"] is not None:
        raise ConfigError("convert these files into a store first, and that to --tp")
    place, stated = local_path(source), f"blocks of {block} tokens of the {backend} backend"
    if kind == "lmcache":
        size, tp = options["engine_chunk_tokens"], options["engine_tp"]
        return lmcache_files.read_prompt(place, group, tokens, block, backend, size, tp), stated
    return example_connector.read_prompt(place, group, tokens, block, backend), stated


def _open_tier(source: str, group: Group, tokens: list[int], options: dict[str, Any]) -> tuple[Tier, Rows, PagedSource]:
    from tplayout.admin.vllm_tier import find_tiers, open_tier, read_prompt, rows_of

    configs = find_tiers(local_path(source))
    if len(configs) > 1:
        names = ", ".join(str(config.parent) for config in configs)
        raise ConfigError(f"{source} holds {len(configs)} tiers: name one as SRC: {names}")
    tier = open_tier(configs[0])
    if options["engine_block_size"] not in (None, tier.block_tokens):
        raise ConfigError(f"{configs[0]} says blocks of {tier.block_tokens} tokens, not {options['engine_block_size']}")
    rows = rows_of(tier, group, options["engine_tp"], options["page_order"])
    return tier, rows, read_prompt(tier, rows, tokens, options["hash_algo"], options["hash_seed"])


def _to_tp(
    tier: Tier,
    rows: Rows,
    pages: PagedSource,
    destination: str,
    tokens: list[int],
    stated: str,
    options: dict[str, Any],
    work: Work,
) -> Report:
    from tplayout.admin.peers import tier_to_tier
    from tplayout.admin.vllm_tier import rows_of, tier_for_tp

    if tier.canonical is not None:
        raise ConfigError("files of canonical_layout are the same for every TP size: --tp changes nothing")
    target = tier_for_tp(tier, _directory(destination), options["tp"])
    new_rows = rows_of(target, rows.group, options["tp"], rows.order)
    hashes = target.hashes(tokens, options["hash_algo"], options["hash_seed"])
    return tier_to_tier(pages, tokens, target, new_rows, hashes, stated, options["unchecked"], work)


def _prompt(options: dict[str, Any]) -> list[int]:
    from tplayout.admin.selection import read_token_file

    if len(options["token_files"]) != 1:
        raise ConfigError("these files hold no token ids: give the prompt's with --tokens FILE, one prompt a run")
    return read_token_file(options["token_files"][0])


def _identity(options: dict[str, Any]) -> Identity:
    from tplayout.model import VLLM_DTYPES, describe_model

    if options["model"] is None:
        raise ConfigError("these files do not describe their model: name its directory with --model")
    return describe_model(
        options["model"],
        kv_dtype=VLLM_DTYPES.get(options["dtype"], "auto"),
        compute_dtype=options["compute_dtype"],
        chunk_tokens=options["chunk_tokens"],
        weights_label=options["weights_label"],
    )


def _directory(url: str) -> Path:
    from tplayout.admin.places import check_directory

    if not is_local(url):
        raise ConfigError(f"DST {url}: vLLM's tier is a local directory")
    check_directory(local_path(url))
    return local_path(url)

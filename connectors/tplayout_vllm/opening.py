"""Opens the scheduler's side: identity, namespace, staging region, I/O processes. Or refuses to start.

Layer: below connector.py. The only module that turns a vLLM configuration into an identity.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from tplayout.arguments import format_size
from tplayout.errors import ConfigError
from tplayout.format.identity import Identity, NamespaceDocument, StorageFacts
from tplayout.model import describe_weights, model_config, read_config, weight_quantization
from tplayout.staging.plan import StagingPlan
from tplayout.staging.region import RegionError, RegionPlan
from tplayout.staging.stager import Stager
from tplayout.storage.redact import redact
from tplayout.storage.url import absolute_url
from tplayout_vllm.admission import Admission, engine_tables
from tplayout_vllm.discovery import block_tables
from tplayout_vllm.metadata import StagingRef, WorkerReport, this_machine
from tplayout_vllm.options import Options
from tplayout_vllm.placement import Placement, Rank, place
from tplayout_vllm.scheduler import SchedulerSide
from tplayout_vllm.sizing import Engines, io_processes, staging_slots
from tplayout_vllm.store_look import look_at_store

logger = logging.getLogger("vllm.tplayout")


def check_setup(vllm_config: Any) -> None:
    """Refuse what cannot be served, before the model is loaded. Raises ConfigError, one line."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ConfigError("context parallelism splits tokens over ranks, which TPLayoutConnector does not support yet")
    if getattr(parallel, "nnodes", 1) > 1:
        raise ConfigError(
            f"nnodes is {parallel.nnodes}: TPLayoutConnector needs all ranks of an engine on one machine; "
            "run one engine a node on one shared store"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "--weight-transfer-config replaces weights while the server runs, and KV of the new ones would be stored "
            "as KV of the old: TPLayoutConnector does not support it, run without one of them"
        )
    if vllm_config.model_config.is_encoder_decoder:
        raise ConfigError("encoder-decoder models are not supported by TPLayoutConnector")


def check_machines(reports: Mapping[Rank, WorkerReport]) -> None:
    """Refuse ranks that cannot map the staging region: those that Ray, say, has placed on another node."""
    here = this_machine()
    for (pp_rank, tp_rank), report in sorted(reports.items()):
        if here and report.machine and report.machine != here:
            raise ConfigError(
                f"rank pp{pp_rank} tp{tp_rank} runs on another machine (or in another PID namespace) than the "
                "scheduler: TPLayoutConnector needs all ranks of an engine on one machine; "
                "run one engine a node on one shared store"
            )


def open_scheduler_side(
    vllm_config: Any, kv_cache_config: Any, manager: Any, options: Options, reports: Mapping[Rank, WorkerReport]
) -> SchedulerSide:
    """Everything that needs the workers' reports. manager: the engine's KVCacheManager.

    Raises ConfigError or NamespaceMismatch to refuse the start.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    # For the I/O processes, and for whoever reads the log: the working directory is not theirs.
    options = replace(options, url=absolute_url(options.url))
    check_machines(reports)
    placement = place(reports, options.chunk_tokens, model.get_total_num_kv_heads(), parallel.tensor_parallel_size)
    identity = _identity(vllm_config, options, placement)
    for warning in options.warnings:
        logger.warning("tplayout: %s", warning)
    transfer = vllm_config.kv_transfer_config
    found = look_at_store(options, identity, saves=transfer.is_kv_producer)
    hasher = found.hasher
    key_id = None if options.encryption_key is None else options.encryption_key.id
    facts = StorageFacts(hasher.name, hasher.key_id, found.codec, key_id)
    document = NamespaceDocument(identity, facts, _shown_name(model)).to_bytes()
    writers = tuple(len(ranks) for ranks in placement.writers)
    plan = StagingPlan(
        url=options.url,
        storage_options=options.storage_options,
        timeout_s=options.store_timeout,
        max_bytes=options.max_bytes or 0,
        namespace=identity.digest(),
        document=document,
        agreed=found.agreed,
        geometry=placement.geometry,
        secret=options.secret,
        encryption_key=options.encryption_key,
        digest=hasher.name,
        codec=found.codec,
        slots=1,
        writers=writers,
        io_processes=io_processes(options.io_processes),
        load_deadline_s=options.load_deadline,
    )
    stored_bytes = sum(layout.nbytes for layout in plan.layouts)
    if 0 < plan.max_bytes < stored_bytes:
        raise ConfigError(
            f"kv_connector_extra_config: 'max_bytes' {format_size(plan.max_bytes)} is less than one chunk of this "
            f"model, {format_size(stored_bytes)}; raise it, or lower 'chunk_tokens'"
        )
    slot_bytes = RegionPlan(1, tuple(layout.nbytes for layout in plan.layouts), writers).slot_bytes
    slots = staging_slots(options.staging_bytes, slot_bytes, Engines.of(parallel))
    try:
        stager = Stager(replace(plan, slots=slots))
    except RegionError as error:
        raise ConfigError(
            f"{error}; lower 'staging_bytes' in kv_connector_extra_config, or raise what limits this process "
            "(ulimit -f, ulimit -v, ulimit -n)"
        ) from None
    if found.fault is not None:
        stager.suspend(found.fault.kind, found.fault.detail, loads=found.fault.loads)
    staging = StagingRef(
        region=stager.region_ref,
        geometry=placement.geometry,
        digest=hasher.name,
        key_id=hasher.key_id,
        places=placement.places,
        writers=placement.writers,
    )
    logger.info(
        "tplayout: %s, namespace %s, chunks of %d tokens (%s), staging %s for %d chunks, %d I/O process(es), "
        "load deadline %g s%s, digest %s, codec %s, %s%s",
        redact(options.url),
        identity.namespace,
        placement.geometry.chunk_tokens,
        format_size(slot_bytes),
        format_size(slots * slot_bytes),
        slots,
        plan.io_processes,
        options.load_deadline,
        " (never slower)" if options.never_slower else " (also where computing is faster)",
        hasher.name,
        found.codec if key_id is None else f"{found.codec} (key {key_id})",
        transfer.kv_role,
        "".join([", strict" * options.strict, f", max_bytes {format_size(plan.max_bytes)}" * bool(plan.max_bytes)]),
    )
    return SchedulerSide(
        stager,
        staging,
        block_tables(kv_cache_config, placement.tables),
        identity.digest(),
        Admission(engine_tables(manager), manager, _tokens_ahead(vllm_config)),
        loads=transfer.is_kv_consumer,
        saves=transfer.is_kv_producer,
        never_slower=options.never_slower,
    )


def _tokens_ahead(vllm_config: Any) -> int:
    """Tokens behind a request's last one for which a step of speculative decoding takes blocks, as vLLM counts them."""
    drafts = int(vllm_config.num_speculative_tokens)
    return 1 + drafts + int(vllm_config.num_lookahead_tokens) if drafts else 0


def _identity(vllm_config: Any, options: Options, placement: Placement) -> Identity:
    model = vllm_config.model_config
    label = options.weights_label
    load_format = getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format)
    if load_format == "dummy" and label is None:
        raise ConfigError(
            "--load-format dummy: random weights have no fingerprint; name them with 'weights_label' in "
            "kv_connector_extra_config (servers that share KV must use the same label and seed)"
        )
    weights, config = _model_files(model, label)
    overrides = model.hf_overrides
    if not isinstance(overrides, Mapping):
        if label is None:
            raise ConfigError(
                "hf_overrides is a function, so what it changes cannot be told; name model and function together with "
                "'weights_label' in kv_connector_extra_config"
            )
        overrides = {}
    return Identity(
        weights=describe_weights(weights, label, str(load_format)),
        config={**model_config(config, overrides, model.max_model_len), **_engine_settings(vllm_config)},
        compute_dtype=str(model.dtype).removeprefix("torch."),
        quantization=weight_quantization(read_config(config), model.quantization),
        geometry=placement.geometry,
    )


def _shown_name(model: Any) -> str:
    """The model's name for people: any text will do, but text it must be, which a file name need not be."""
    return Path(str(model.model)).name.encode("utf-8", "backslashreplace").decode()


def _engine_settings(vllm_config: Any) -> dict[str, Any]:
    """What else an engine was told that changes KV values, in a member of its own; nothing where it is as usual."""
    model, lora = vllm_config.model_config, vllm_config.lora_config
    scheme = getattr(model, "quantization_config", None)
    stated = {
        "lora_target_modules": sorted(getattr(lora, "target_modules", None) or ()),
        "model_class_overrides": getattr(model, "model_class_overrides", None),
        "quantization_config": asdict(scheme) if is_dataclass(scheme) and not isinstance(scheme, type) else scheme,
    }
    found = {name: value for name, value in stated.items() if value}
    return {"engine": json.loads(json.dumps(found, default=str))} if found else {}


def _model_files(model: Any, label: str | None) -> tuple[Path, Path]:
    """Where on this machine the model's weights (a directory or one file) and its config.json (a directory) are."""
    path = Path(str(model.model))
    stated = model.hf_config_path and _directory(str(model.hf_config_path), model.revision, "configuration")
    if path.is_file():  # GGUF
        if not stated and not (path.parent / "config.json").is_file():
            raise ConfigError(
                f"model {path} is a single file, without its configuration: put the model's config.json beside it, or "
                "name its directory with --hf-config-path"
            )
        return path, stated or path.parent
    if stated and label is not None:  # nothing else is looked at
        return stated, stated
    directory = _directory(str(model.model), model.revision, "configuration" if label is not None else "weights")
    return directory, stated or directory


def _directory(name: str, revision: str | None, wanted: str) -> Path:
    """A directory, or that of a hub's model on this machine. wanted: what it is for."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:
        way_out = "download the model to a directory and serve that, or name the directory of its config.json with "
        way_out += "--hf-config-path"
        if wanted == "weights":
            way_out += " and its weights with 'weights_label' in kv_connector_extra_config"
        raise ConfigError(
            f"model {name}: its {wanted} cannot be identified, since its files are not found on this machine "
            f"({type(error).__name__}); {way_out}"
        ) from None

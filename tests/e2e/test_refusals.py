"""What cannot work is refused at start with one line that names the option or field; what can be served is served."""

import json
from pathlib import Path
from typing import Any

import demo_models
import pytest
from e2e_cases import engine_args, noise, offload
from vllm_engine import EngineFailed, engine

from tplayout import Cache, describe_model


def refusal(log: Path, kv: dict[str, Any], **args: Any) -> list[str]:
    """Start an engine that must refuse; the lines of its log that hold a refusal of ours."""
    with pytest.raises(EngineFailed), engine(engine_args("llama", 1, **args, **kv), log, start_timeout=120) as running:
        running.generate(noise(10, 1), 1)
    names = ("ConfigError", "NamespaceMismatch", "GeometryError", "tplayout.errors")
    return [line for line in log.read_text().splitlines() if any(name in line for name in names)]


def assert_one_line(lines: list[str], *words: str) -> None:
    """At least one of the lines (vLLM repeats an error in each process) holds all the words."""
    assert any(all(word in line for word in words) for line in lines), lines


def test_unknown_option(tmp_path: Path) -> None:
    lines = refusal(tmp_path / "log", offload(f"file://{tmp_path}/store", chunk_token=64))
    assert_one_line(lines, "'chunk_token'", "chunk_tokens")
    assert not (tmp_path / "store").exists()


def test_namespace_that_differs(tmp_path: Path) -> None:
    """A server with a secret on a store that was made without (by the Python API, which names the model alike)."""
    identity = describe_model(demo_models.ensure("llama"), compute_dtype="float32")
    Cache.open(f"file://{tmp_path}/store", identity, model="llama").close()
    secret = tmp_path / "secret"
    secret.write_text("a secret of more than sixteen bytes\n")
    lines = refusal(tmp_path / "log", offload(f"file://{tmp_path}/store", secret_key_file=str(secret)))
    assert_one_line(lines, identity.namespace, "written without a secret", "xxh3-128", "leave it out")


@pytest.mark.slow
def test_staging_larger_than_the_machine(tmp_path: Path) -> None:
    lines = refusal(tmp_path / "log", offload(f"file://{tmp_path}/store", staging_bytes="512TiB"))
    assert_one_line(lines, "'staging_bytes'", "lower it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "ftpp://nowhere/kv"}, ("url", "ftpp")),
        ({"url": "s3://"}, ("url", "bucket")),
        ({"url": ""}, ("'url'", "required")),
        ({"staging_bytes": 100}, ("'staging_bytes'", "chunk")),
        ({"chunk_tokens": 0}, ("'chunk_tokens'", "from 16")),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_wrong_values(tmp_path: Path, options: dict[str, Any], words: tuple[str, ...]) -> None:
    kv = offload(**{"url": f"file://{tmp_path}/store", **options})
    assert_one_line(refusal(tmp_path / "log", kv), *words)


@pytest.mark.slow
def test_strict_refuses_an_unreachable_store(tmp_path: Path) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "nobody", "secret": "not-a-secret-of-anyone"}
    lines = refusal(tmp_path / "log", offload("s3://bucket/kv", storage_options=options, strict=True))
    assert_one_line(lines, "'strict'", "s3://bucket/kv")
    assert "not-a-secret-of-anyone" not in "\n".join(lines)


@pytest.mark.slow
def test_dummy_weights_need_a_label(tmp_path: Path) -> None:
    kv = offload(f"file://{tmp_path}/store")
    assert_one_line(refusal(tmp_path / "log", kv, load_format="dummy"), "'weights_label'", "dummy")

"""tplayout/format/identity.py: what is in an identity, how it is named, and its document."""

import dataclasses
import json
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.support.documents import namespace_document
from tplayout.errors import ConfigError, FormatError, Reason
from tplayout.format.canonical import canonical_json
from tplayout.format.digest import KEYED
from tplayout.format.geometry import Geometry
from tplayout.format.identity import (
    ABSENT,
    MAX_DOCUMENT_BYTES,
    Identity,
    parse_namespace_document,
)

STORAGE = {"digest": "xxh3-128", "key_id": None, "codec": "none"}
CONFIG = {"model_type": "llama", "rope_theta": 10000.0, "eps": 1e-6, "rope_scaling": {"factor": 2, "low": [1, 2]}}


@pytest.fixture
def identity(tiny: Geometry) -> Identity:
    return Identity("files:0123", CONFIG, "bfloat16", None, tiny)


def test_golden_identity(identity: Identity) -> None:
    """[M9] [M14] Fixed for version 1: bytes, digest and namespace."""
    data = canonical_json(identity.to_json())
    assert data.startswith(
        b'{"compute_dtype":"bfloat16","config":{"eps":0.000001,"model_type":"llama","rope_scaling":{"factor":2,'
        b'"low":[1,2]},"rope_theta":10000},"format":1,"geometry":{"chunk_tokens":4,"groups":[{"dtype":"F16",'
    )
    assert data.endswith(b'"quantization":null,"weights":"files:0123"}')
    assert identity.digest() == blake3(data, derive_key_context="tplayout 1 identity").digest()
    assert identity.digest().hex() == "65ec3b0c9402012e9ab6d2e9ebd8958e6e1fbcde0c6c7335e6010241bbd51d3c"
    assert identity.namespace == identity.digest().hex()[:32]


def test_the_members_are_those_of_the_format(identity: Identity) -> None:
    """[M3] [M9] No TP, block size, host or time could be in it."""
    document = identity.to_json()
    assert set(document) == {"format", "weights", "config", "compute_dtype", "quantization", "geometry"}
    assert set(document["geometry"]) == {"chunk_tokens", "groups"}
    assert set(document["geometry"]["groups"][0]) == {
        "name",
        "kind",
        "layers",
        "heads",
        "parts",
        "dtype",
        "window",
        "scales",
    }


def test_integers_and_floats_of_one_value_are_one_identity(identity: Identity) -> None:
    """[M8]"""
    same = dataclasses.replace(
        identity, config={**CONFIG, "rope_theta": 10000, "rope_scaling": {"low": [1.0, 2], "factor": 2.0}}
    )
    assert same == identity
    assert hash(same) == hash(identity)
    assert same.namespace == identity.namespace
    assert same.diff(identity) == []


def changed(identity: Identity) -> list[tuple[Identity, str, Any, Any]]:
    full, window = identity.geometry.groups

    def group(**changes: Any) -> Identity:
        groups = (dataclasses.replace(full, **changes), window)
        return dataclasses.replace(identity, geometry=Geometry(4, groups))

    def replace(**changes: Any) -> Identity:
        return dataclasses.replace(identity, **changes)

    theta = {**CONFIG, "rope_theta": 500000.0}
    low = {**CONFIG, "rope_scaling": {"factor": 2, "low": [1, 3]}}
    return [
        (replace(weights="files:4567"), "weights", "files:0123", "files:4567"),
        (replace(compute_dtype="float32"), "compute_dtype", "bfloat16", "float32"),
        (replace(quantization="fp8"), "quantization", None, "fp8"),
        (replace(config=theta), "config.rope_theta", 10000, 500000),
        (replace(config=low), "config.rope_scaling.low", [1, 2], [1, 3]),
        (replace(config={**CONFIG, "new": True}), "config.new", ABSENT, True),
        (replace(geometry=Geometry(8, (full, window))), "geometry.chunk_tokens", 4, 8),
        (group(dtype="BF16"), "geometry.groups[0].dtype", "F16", "BF16"),
        (group(layers=(0, 4)), "geometry.groups[0].layers", [0, 2], [0, 4]),
        (group(scales=((1.0, 0.5),) * 2), "geometry.groups[0].scales", None, [[1.0, 0.5], [1.0, 0.5]]),
    ]


@pytest.mark.parametrize("case", range(10))
def test_each_field_makes_another_namespace_and_is_named(identity: Identity, case: int) -> None:
    """[M9]"""
    other, field, ours, theirs = changed(identity)[case]
    assert other != identity
    assert other.namespace != identity.namespace
    assert identity.diff(other) == [(field, ours, theirs)]
    assert other.diff(identity) == [(field, theirs, ours)]


def test_groups_are_compared_one_by_one(identity: Identity) -> None:
    fewer = dataclasses.replace(identity, geometry=Geometry(4, identity.geometry.groups[:1]))
    [(field, ours, theirs)] = identity.diff(fewer)
    assert (field, theirs) == ("geometry.groups[1]", ABSENT)
    assert ours["name"] == "window"


def test_an_identity_does_not_change_with_its_callers_config(identity: Identity) -> None:
    config = {"a": {"b": 1}}
    own = dataclasses.replace(identity, config=config)
    before = own.digest()
    config["a"]["b"] = 2
    assert own.digest() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", ""),
        ("weights", None),
        ("weights", "x" * 5000),
        ("compute_dtype", None),
        ("quantization", ""),
        ("config", None),
        ("config", []),
        ("config", {"a": float("nan")}),
        ("config", {"a": 2**53 + 1}),
        ("config", {"a": object()}),
        ("config", {1: 2}),
        ("geometry", {"chunk_tokens": 4}),
    ],
)
def test_what_is_no_identity_is_refused(identity: Identity, field: str, value: Any) -> None:
    """[M8]"""
    with pytest.raises(ConfigError):
        dataclasses.replace(identity, **{field: value})


def test_the_document_is_read_back(identity: Identity) -> None:
    keyed = {"digest": KEYED, "key_id": "0123456789abcdef", "codec": "none"}
    encrypted = {**keyed, "codec": "aes-256-gcm", "encryption_key_id": "fedcba9876543210"}
    for storage in (STORAGE, keyed, encrypted):
        document = parse_namespace_document(namespace_document(identity, storage, "a/b"), identity.namespace)
        assert document.identity == identity
        assert document.storage.to_json() == storage
        assert document.model == "a/b"


def test_the_document_is_readable_and_a_function_of_its_fields(identity: Identity) -> None:
    """[M12]"""
    data = namespace_document(identity, STORAGE, "a/b")
    assert data == namespace_document(identity, dict(reversed(STORAGE.items())), "a/b")
    assert data.endswith(b"\n}\n") or data.endswith(b"}\n")
    assert data.count(b"\n") > 20
    assert set(json.loads(data)) == {"tplayout", "model", "namespace", "identity_digest", "storage", "identity"}
    assert json.loads(data)["identity_digest"] == identity.digest().hex()


def test_a_document_that_no_reader_takes_is_not_written(identity: Identity) -> None:
    """[M7]"""
    for model in ("\ud800", "x" * (MAX_DOCUMENT_BYTES + 1), None, 5):
        with pytest.raises(ConfigError):
            namespace_document(identity, STORAGE, model)  # type: ignore[arg-type]


def test_a_large_double_survives_the_document(identity: Identity) -> None:
    """[M8] RFC 8785 writes such a double as digits that are not its exact integer."""
    own = dataclasses.replace(identity, config={"a": 3.469697301702933e16, "b": 1e300, "c": 2**60})
    assert parse_namespace_document(namespace_document(own, STORAGE, ""), own.namespace).identity == own


def reason_of(data: bytes, namespace: str) -> Reason:
    with pytest.raises(FormatError) as caught:
        parse_namespace_document(data, namespace)
    assert len(str(caught.value)) < 600
    return caught.value.reason


def test_a_document_that_does_not_hash_to_its_directory_is_refused(identity: Identity) -> None:
    """[M10]"""
    data = namespace_document(identity, STORAGE, "m")
    assert reason_of(data, "0" * 32) is Reason.WRONG_NAMESPACE
    for old, new in ((b"10000", b"10001"), (b'"bfloat16"', b'"float32"'), (identity.namespace.encode(), b"0" * 32)):
        assert reason_of(data.replace(old, new), identity.namespace) is Reason.WRONG_NAMESPACE


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("model",), None, "model is None, must be text"),
        (("model",), ..., "namespace.json lacks 'model'"),
        (("host\n",), "x", r"namespace.json has 'host\n', which does not belong there"),
        (("identity", "weights"), ..., "identity lacks 'weights'"),
        (("identity", "tp"), 4, "identity has 'tp', which does not belong there"),
    ],
)
def test_the_member_that_is_wrong_is_named(identity: Identity, path: tuple[str, ...], value: Any, says: str) -> None:
    document = json.loads(namespace_document(identity, STORAGE, "m"))
    target = document if len(path) == 1 else document[path[0]]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    with pytest.raises(FormatError) as caught:
        parse_namespace_document(json.dumps(document).encode(), identity.namespace)
    assert str(caught.value) == f"bad-namespace: {says}"


CHANGES = [
    (("tplayout",), 2, Reason.WRONG_VERSION),
    (("tplayout",), True, Reason.WRONG_VERSION),
    (("tplayout",), "1", Reason.WRONG_VERSION),
    (("identity", "format"), 2, Reason.WRONG_VERSION),
    (("identity", "format"), 1.0000001, Reason.WRONG_VERSION),
    (("model",), 5, Reason.BAD_NAMESPACE),
    (("host",), "x", Reason.BAD_NAMESPACE),
    (("identity",), [], Reason.BAD_NAMESPACE),
    (("identity", "tp"), 4, Reason.BAD_NAMESPACE),
    (("identity", "weights"), 5, Reason.BAD_NAMESPACE),
    (("identity", "config"), None, Reason.BAD_NAMESPACE),
    (("identity", "geometry"), {}, Reason.BAD_NAMESPACE),
    (("identity", "geometry", "chunk_tokens"), 4.5, Reason.BAD_NAMESPACE),
    (("storage",), None, Reason.BAD_NAMESPACE),
    (("storage", "level"), 3, Reason.BAD_NAMESPACE),
    (("storage", "digest"), None, Reason.BAD_NAMESPACE),
    (("storage", "digest"), "md5", Reason.UNSUPPORTED_DIGEST),
    (("storage", "digest"), KEYED, Reason.BAD_NAMESPACE),
    (("storage", "key_id"), "0" * 16, Reason.BAD_NAMESPACE),
    (("storage", "key_id"), 5, Reason.BAD_NAMESPACE),
    (("storage", "codec"), "zstd", Reason.UNSUPPORTED_CODEC),
    (("storage", "codec"), 5, Reason.BAD_NAMESPACE),
    (("storage", "codec"), "aes-256-gcm", Reason.BAD_NAMESPACE),
    (("storage",), {"codec": "another", "members": 1}, Reason.UNSUPPORTED_CODEC),
    (("storage",), {**STORAGE, "codec": "aes-256-gcm", "encryption_key_id": "x" * 16}, Reason.BAD_NAMESPACE),
    (("storage",), {**STORAGE, "codec": "aes-256-gcm", "encryption_key_id": None}, Reason.BAD_NAMESPACE),
    (("storage",), {**STORAGE, "encryption_key_id": "0" * 16}, Reason.BAD_NAMESPACE),
    (("identity_digest",), "0" * 64, Reason.WRONG_NAMESPACE),
    (("identity_digest",), None, Reason.WRONG_NAMESPACE),
]


@pytest.mark.parametrize(("path", "value", "reason"), CHANGES, ids=range(len(CHANGES)))
def test_hostile_documents_have_one_reason_each(
    identity: Identity, path: tuple[str, ...], value: Any, reason: Reason
) -> None:
    """[M10] [M11] [M13] [M31] [M35]"""
    document = json.loads(namespace_document(identity, STORAGE, "m"))
    target = document
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    assert reason_of(json.dumps(document).encode(), identity.namespace) is reason


def test_hostile_text_has_one_reason_each(identity: Identity) -> None:
    """[M7] [M11] [M29]"""
    good = namespace_document(identity, STORAGE, "m")
    cases = {
        Reason.TOO_LARGE: good + b" " * MAX_DOCUMENT_BYTES,
        Reason.NOT_UTF8: good.replace(b"llama", b"ll\xffma"),
        Reason.NOT_JSON: good[:-2],
        Reason.DUPLICATE_NAME: good.replace(b'"model": "m"', b'"model": "m", "model": "m"'),
        Reason.TOO_DEEP: good.replace(b"[0", b"[" * 20 + b"0"),
        Reason.WRONG_VERSION: b"{}",
        Reason.BAD_NAMESPACE: b"[]",
    }
    for reason, data in cases.items():
        if reason is Reason.TOO_DEEP:
            data = b"[" * 20
        assert reason_of(data, identity.namespace) is reason


@given(st.data())
def test_no_cut_document_is_accepted(data: st.DataObject) -> None:
    """[M10] [M27]"""
    own = Identity("w", {"a": 1}, "f", None, Geometry.from_json(TINY))
    document = namespace_document(own, STORAGE, "m")
    cut = data.draw(st.integers(0, len(document) - 2))
    assert reason_of(document[:cut], own.namespace) is Reason.NOT_JSON


TINY: dict[str, Any] = {
    "chunk_tokens": 1,
    "groups": [
        {
            "name": "g",
            "kind": "full",
            "layers": [0],
            "heads": 1,
            "parts": [{"name": "k", "dim": 1}],
            "dtype": "U8",
            "window": None,
            "scales": None,
        }
    ],
}

"""tplayout/errors.py: errors carry values to count by, and survive being passed between processes."""

import pickle

import pytest

from tplayout import errors as e


@pytest.mark.parametrize(
    "error",
    [
        e.FormatError(e.Reason.TRUNCATED, "3 bytes", "ns/aa/x"),
        e.NotFound("ns/x"),
        e.OverLimit("ns/x", nbytes=5),
        e.StorageError("busy", e.StorageErrorKind.SHORT_READ),
        e.NamespaceMismatch("geometry.groups[0].dtype", "BF16", "F16"),
        e.ConfigError("url: empty"),
    ],
)
def test_errors_are_tplayout_errors_and_pickle(error: e.TPLayoutError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(error, e.TPLayoutError)
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_format_errors_name_the_object_and_the_reason() -> None:
    error = e.FormatError(e.Reason.WRONG_KEY, "content of another chunk")
    assert str(error) == "wrong-key: content of another chunk"
    assert str(error.at("ns/aa/x")) == "ns/aa/x: wrong-key: content of another chunk"
    assert error.at("x").reason is e.Reason.WRONG_KEY
    assert str(e.FormatError(e.Reason.TRUNCATED)) == "truncated"


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (e.NotFound, "not-found"),
        (e.StorageTimeout, "timeout"),
        (e.Forbidden, "forbidden"),
        (e.StorageFull, "full"),
        (e.OverLimit, "limit"),
        (e.Unavailable, "unavailable"),
        (e.StorageError, "unavailable"),
    ],
)
def test_storage_errors_have_a_kind(cls: type[e.StorageError], kind: str) -> None:
    assert cls("x").kind == kind
    assert str(cls("x")) == f"{kind}: x"


def test_a_mismatch_shows_both_sides_and_stays_short() -> None:
    error = e.NamespaceMismatch("config.x", 1, list(range(1000)))
    assert str(error).startswith("namespace differs in config.x: ours 1, theirs [0, 1,")
    assert len(str(error)) < 300


def test_a_wrong_length_is_damage_and_nothing_else_is() -> None:
    long, short = (e.StorageError("x", kind) for kind in (e.StorageErrorKind.TOO_LARGE, e.StorageErrorKind.SHORT_READ))
    assert str(e.as_damage(long, "ns/aa/x")) == "ns/aa/x: trailing: x"
    assert str(e.as_damage(long, too_large=e.Reason.TOO_LARGE)) == "too-large: x"
    assert str(e.as_damage(short)) == "truncated: x"
    other = e.Unavailable("x")
    assert e.as_damage(other) is other

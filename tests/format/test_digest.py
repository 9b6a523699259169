"""tplayout/format/digest.py: what a digest covers, and who may be told what about a secret."""

import copy
import pickle

import pytest
import xxhash
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tplayout.errors import ConfigError, FormatError, Reason
from tplayout.format.digest import BLAKE3, DIGEST_BYTES, KEYED, XXH3, make_hasher, secret_id

SECRET = b"0123456789abcdef"
KEY = bytes(range(32))
MESSAGE = b"tplayout1 cell\0\0" + KEY + b"\2\0\0\0" + b"\1\2\0\0" + b"\4\0\0\0" + b"full" + b"cell bytes"


def test_digests_are_the_formulas_of_the_format() -> None:
    """[M22] head 2, layer 513."""
    data = memoryview(b"cell bytes")
    derived = blake3(SECRET, derive_key_context="tplayout 1 cell digest secret").digest()
    expected = {
        XXH3: xxhash.xxh3_128_digest(MESSAGE),
        BLAKE3: blake3(MESSAGE).digest(),
        KEYED: blake3(MESSAGE, key=derived).digest(),
    }
    for name, digest in expected.items():
        hasher = make_hasher(name, SECRET if name == KEYED else None)
        assert hasher.cell(KEY, "full", 2, 513, data) == digest
        assert (hasher.name, hasher.size) == (name, len(digest))
        assert DIGEST_BYTES[name] == len(digest)


def test_golden_digests() -> None:
    """[M22] Fixed for version 1; the first also pins XXH3's byte order."""
    data = memoryview(b"cell bytes")
    assert make_hasher().cell(KEY, "full", 2, 513, data).hex() == "6d52b1ad8307ea014f4af74b5e6babc4"
    assert (
        make_hasher(BLAKE3).cell(KEY, "full", 2, 513, data).hex()
        == "728bdc9ad54bf7a0e30a989faab087a0ebd887ce1612a0e5b90cbe0342c7b63e"
    )
    assert (
        make_hasher(None, SECRET).cell(KEY, "full", 2, 513, data).hex()
        == "7341ddade93de1675065ae568858b66bbca9c420dc45e482a69ced224b87edf3"
    )
    assert secret_id(SECRET) == "d334779318fd02aa"


COORDINATES = st.tuples(
    st.sampled_from([KEY, bytes(32)]),
    st.sampled_from(["a", "ab", "b.c"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.binary(max_size=3),
)


@pytest.mark.parametrize("name", DIGEST_BYTES)
@given(a=COORDINATES, b=COORDINATES)
def test_bytes_and_every_coordinate_matter(name: str, a: tuple, b: tuple) -> None:  # type: ignore[type-arg]
    """[M22]"""
    hasher = make_hasher(name, SECRET if name == KEYED else None)
    one, other = (hasher.cell(*fields[:4], memoryview(fields[4])) for fields in (a, b))
    assert (one == other) == (a == b)


def test_defaults() -> None:
    assert make_hasher().name == XXH3
    assert make_hasher(secret=SECRET).name == KEYED
    assert make_hasher().key_id is None
    assert make_hasher(secret=SECRET).key_id == secret_id(SECRET)


def test_another_secret_gives_another_digest_and_id() -> None:
    """[M24]"""
    one, other = make_hasher(secret=SECRET), make_hasher(secret=SECRET + b"x")
    assert one.key_id != other.key_id
    assert one.cell(KEY, "full", 0, 0, memoryview(b"")) != other.cell(KEY, "full", 0, 0, memoryview(b""))


@pytest.mark.parametrize(
    ("name", "secret", "key_id"),
    [
        (KEYED, None, None),
        (KEYED, None, secret_id(SECRET)),
        (KEYED, SECRET, secret_id(b"y" * 16)),
        (XXH3, SECRET, None),
        (BLAKE3, SECRET, None),
        (XXH3, None, secret_id(SECRET)),
    ],
)
def test_a_missing_superfluous_or_other_secret_is_typed(name: str, secret: bytes | None, key_id: str | None) -> None:
    """[M24]"""
    with pytest.raises(FormatError) as caught:
        make_hasher(name, secret, key_id)
    assert caught.value.reason is Reason.WRONG_SECRET


def test_unknown_digests_are_refused() -> None:
    """[M13]"""
    with pytest.raises(FormatError) as caught:
        make_hasher("md5")
    assert caught.value.reason is Reason.UNSUPPORTED_DIGEST


@pytest.mark.parametrize("secret", [b"", b"x", b"x" * 15])
def test_short_secrets_are_refused(secret: bytes) -> None:
    """[M23]"""
    with pytest.raises(ConfigError, match="16"):
        make_hasher(secret=secret)


def test_secrets_do_not_show() -> None:
    """[M23]"""
    secret = b"hunter2 hunter2 hunter2"
    hasher = make_hasher(secret=secret)
    errors = []
    for attempt in (lambda: make_hasher(XXH3, secret), lambda: make_hasher(KEYED, secret, "0" * 16)):
        with pytest.raises(FormatError) as caught:
            attempt()
        errors.append(str(caught.value) + repr(caught.value))
    with pytest.raises(ConfigError) as short:
        make_hasher(secret=b"hunter2")
    derived = blake3(secret, derive_key_context="tplayout 1 cell digest secret").digest()
    for text in (repr(hasher), str(hasher), f"{hasher}", str(short.value), *errors):
        assert "hunter2" not in text
        assert derived.hex() not in text
        assert repr(derived) not in text
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="secret"):
            leak(hasher)

"""tplayout/format/keys.py: keys by their formulas, names by their grammar."""

import struct
import subprocess
import sys

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tplayout.errors import ConfigError, FormatError, GeometryError, Reason
from tplayout.format import keys as k

NAMESPACE = bytes(range(32))


def test_a_key_is_the_formula_of_the_format() -> None:
    """[M14] The message is spelled out byte by byte."""
    extras = blake3(b"\1\0\0\0\4\0\0\0salt\3\0\0\0\0\0\0\0abc", derive_key_context="tplayout 1 chunk extras")
    assert k.extras_digest([("salt", b"abc")]) == extras.digest()
    message = NAMESPACE + bytes(32) + extras.digest() + b"\3\0\0\0" + b"\1\0\0\0\0\1\0\0\xff\xff\xff\x7f"
    key = blake3(message, derive_key_context="tplayout 1 chunk key").digest()
    assert k.chunk_key(NAMESPACE, k.ROOT, [1, 256, 2**31 - 1], extras.digest()) == key


def test_golden_keys() -> None:
    """[M14] Fixed for version 1: a change of these values is a change of the format."""
    chunks = k.chain(NAMESPACE, range(8), 4)
    assert k.NO_EXTRAS.hex() == "38bc0abb679386c98937e5a9cbc5579ad3a50da8007ca07c79314fff4da815b3"
    assert [chunk.key.hex() for chunk in chunks] == [
        "2364f042eb6d804d8fcf03404cb58732efa9d633548392ef430d830963a8cd3a",
        "eed8b64d49665c4583f0b5f654e05aa4a1a8946f9b5d1f18d3c5f5b9f8d119b4",
    ]


def test_keys_do_not_depend_on_the_process() -> None:
    """[M14] Another interpreter with another hash seed agrees."""
    code = (
        "from tplayout.format.keys import chain, prefix_extras;"
        "e = prefix_extras(4, b'l' * 32, [(1, 2, b'm')], 's');"
        "print(chain(bytes(range(32)), range(8), 4, e)[1].key.hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_only_full_chunks_have_a_key() -> None:
    """[M15]"""
    assert [len(k.chain(NAMESPACE, range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(chunk.tokens) == 4 for chunk in k.chain(NAMESPACE, range(11), 4))
    with pytest.raises(GeometryError):
        k.chain(NAMESPACE, range(4), 0)


@pytest.mark.parametrize("token", [-1, 2**31, 2**40, 1.5, "a", None])
def test_tokens_outside_the_range_are_refused(token: object) -> None:
    """[M15]"""
    with pytest.raises(GeometryError, match="token"):
        k.pack_tokens([0, token])  # type: ignore[list-item]


def test_fields_have_fixed_lengths() -> None:
    good = (NAMESPACE, k.ROOT, (1,), k.NO_EXTRAS)
    for position in (0, 1, 3):
        for wrong in (b"", bytes(31), bytes(33)):
            fields = [*good[:position], wrong, *good[position + 1 :]]
            with pytest.raises(GeometryError, match="must be 32"):
                k.chunk_key(*fields)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=24), st.integers(1, 3))
def test_a_chain_can_be_continued_anywhere(tokens: list[int], split: int) -> None:
    extras = k.prefix_extras(4, items=[(3, 4, b"image")])
    chunks = k.chain(NAMESPACE, tokens, 4, extras)
    start = min(split, len(chunks))
    parent = chunks[start - 1].key
    assert chunks[:start] + k.chain(NAMESPACE, tokens[start * 4 :], 4, extras, parent, start) == chunks
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))


def test_every_field_matters() -> None:
    """[M14]"""
    tokens = [5, 6, 7, 8]
    base = k.chunk_key(NAMESPACE, k.ROOT, tokens, k.NO_EXTRAS)
    others = [
        k.chunk_key(bytes(32), k.ROOT, tokens, k.NO_EXTRAS),
        k.chunk_key(NAMESPACE, base, tokens, k.NO_EXTRAS),
        k.chunk_key(NAMESPACE, k.ROOT, [5, 6, 8, 7], k.NO_EXTRAS),
        k.chunk_key(NAMESPACE, k.ROOT, tokens[:3], k.NO_EXTRAS),
        k.chunk_key(NAMESPACE, k.ROOT, tokens, k.extras_digest([("salt", b"")])),
    ]
    assert len({base, *others}) == 6


EXTRAS = st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=4), st.binary(max_size=6)), max_size=4)


@given(EXTRAS, EXTRAS)
def test_different_extras_have_different_digests(a: list[tuple[str, bytes]], b: list[tuple[str, bytes]]) -> None:
    """[M14] The encoding is unambiguous: no concatenation of others reads the same."""
    assert (k.extras_digest(a) == k.extras_digest(b)) == (a == b)


def test_extras_of_a_prefix_come_in_the_order_of_the_format() -> None:
    """[M16] Whatever order the caller has; items appear in the chunks that they touch, relative to them."""
    items = [(6, 4, b"two"), (1, 2, b"one")]
    extras = k.prefix_extras(4, lora=b"L" * 32, items=items, salt="gr\u00fcn")
    lora, salt = ("lora", b"L" * 32), ("salt", "gr\u00fcn".encode())
    assert extras(0) == (lora, ("mm", struct.pack("<qQ", 1, 2) + b"one"), salt)
    assert extras(1) == (lora, ("mm", struct.pack("<qQ", 2, 4) + b"two"), salt)
    assert extras(2) == (lora, ("mm", struct.pack("<qQ", -2, 4) + b"two"), salt)
    assert extras(3) == (lora, salt)
    assert k.prefix_extras(4, b"L" * 32, items[::-1], "gr\u00fcn")(1) == extras(1)
    assert k.prefix_extras(4)(0) == ()


def test_names_are_built_and_parsed() -> None:
    """[M1] [M3] A name is a function of namespace, key and group."""
    key = bytes(range(32))
    name = k.object_name("ab" * 16, key, 12)
    assert name == f"{'ab' * 16}/00/{key.hex()}.12.safetensors"
    assert k.parse_object_name(name) == k.ObjectName("ab" * 16, key, 12)
    assert k.namespace_object("ab" * 16) == f"{'ab' * 16}/namespace.json"


def _bad_names() -> list[str]:
    ns, key = "ab" * 16, bytes(range(32)).hex()
    good = f"{ns}/00/{key}.0.safetensors"
    return [
        "",
        ns,
        f"{ns}/namespace.json",
        good + "\n",
        "/" + good,
        "../" + good,
        good.upper(),
        good + ".tmp",
        f"{ns}/01/{key}.0.safetensors",
        f"{ns}/00/{key}.00.safetensors",
        f"{ns}/00/{key}.-1.safetensors",
        f"{ns}/00/{key}.100.safetensors",
        f"{ns}/00/{key}.safetensors",
        f"{ns}/00/{key[:-1]}.0.safetensors",
        f"{ns}/00/{key}0.0.safetensors",
        f"{ns[:-1]}/00/{key}.0.safetensors",
        good.replace("/", "\\"),
        f"{ns}/00/{key}.\u0661.safetensors",
        f"{ns}//00/{key}.0.safetensors",
    ]


@pytest.mark.parametrize("name", _bad_names())
def test_any_other_name_is_refused(name: str) -> None:
    """[M1]"""
    with pytest.raises(FormatError) as caught:
        k.parse_object_name(name)
    assert caught.value.reason is Reason.BAD_NAME


def test_names_are_never_built_of_wrong_fields() -> None:
    """[M1]"""
    for namespace, key, index in (
        ("AB" * 16, bytes(32), 0),
        ("ab", bytes(32), 0),
        ("ab" * 16, b"", 0),
        ("ab" * 16, bytes(32), -1),
        ("ab" * 16, bytes(32), 100),
        ("../" * 10, bytes(32), 0),
    ):
        with pytest.raises(GeometryError):
            k.object_name(namespace, key, index)
    with pytest.raises(GeometryError):
        k.namespace_object("../x")


@given(st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 63)), min_size=1, max_size=6))
def test_no_name_is_a_directory_of_another(fields: list[tuple[bytes, int]]) -> None:
    """[M2]"""
    ns = "0" * 32
    names = {k.object_name(ns, key, index) for key, index in fields} | {k.namespace_object(ns)}
    assert not any(a != b and b.startswith(a + "/") for a in names for b in names)


@pytest.mark.parametrize("salt", ["\ud800", 5, b"x"])
def test_a_salt_that_is_no_text_is_refused(salt: str) -> None:
    with pytest.raises(ConfigError, match="a salt must be text"):
        k.prefix_extras(4, salt=salt)


def test_arguments_of_prefix_extras_are_refused_by_name() -> None:
    for wrong in ([1], [(0, 1)], [(0, 1, "digest")], [(0.5, 1, b"")], 5):
        with pytest.raises(ConfigError, match=r"^items must be triples"):
            k.prefix_extras(4, items=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^lora must be"):
        k.prefix_extras(4, lora="adapter")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^chunk_tokens must be"):
        k.prefix_extras("4")  # type: ignore[arg-type]


@pytest.mark.parametrize("extras", ["tenant", None, [("a",)], [("a", "b")], [("\ud800", b"")]])
def test_what_are_no_extras_is_refused(extras: object) -> None:
    with pytest.raises(ConfigError, match=r"^extras must be pairs"):
        k.extras_digest(extras)  # type: ignore[arg-type]


def test_a_prompt_brings_its_salt_and_nothing_else() -> None:
    tokens, extras = range(70), k.prefix_extras(16, salt="tenant")
    assert k.prompt_chain(NAMESPACE, tokens, 16, "tenant") == k.chain(NAMESPACE, tokens, 16, extras)
    assert k.prompt_chain(NAMESPACE, tokens, 16, None) == k.chain(NAMESPACE, tokens, 16)


def test_chains_of_known_digests_are_those_of_their_extras() -> None:
    extras = k.prefix_extras(16, salt="tenant")
    whole = k.chain(NAMESPACE, range(70), 16, extras)
    assert k.chain_of_digests(NAMESPACE, range(70), 16, [chunk.extras for chunk in whole]) == whole
    rest = k.chain_of_digests(NAMESPACE, range(32, 70), 16, [k.NO_EXTRAS], whole[1].key, 2)
    assert rest == k.chain(NAMESPACE, range(32, 48), 16, None, whole[1].key, 2)


def test_the_directory_of_a_namespace() -> None:
    name = k.namespace_name(bytes(range(32)))
    assert name == bytes(range(16)).hex()
    assert k.is_namespace(name)
    for text in (name[:-1], name + "0", name.upper(), "", f"{name}/", f"{name}\n"):
        assert not k.is_namespace(text)

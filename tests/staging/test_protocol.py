"""Messages: what is encoded comes back, and nothing else is accepted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplayout.staging.protocol import (
    Cancel,
    Config,
    Hello,
    LineReader,
    Load,
    Loaded,
    Note,
    Ping,
    Pong,
    Probe,
    Probed,
    ProtocolError,
    Save,
    Saved,
    Sealed,
    Stuck,
    Use,
    decode,
    encode,
)

CONFIG = Config(
    url="file:///x", storage_options={"key": "AKIA", "secret": "s3cr3t"}, timeout_s=3.0, max_bytes=0, secret="ab" * 16,
    encryption_key="cd" * 32,
    namespace="00" * 32, geometry={"groups": []}, digest="xxh3-128", document="", agreed=False, codec="none",
    region_bytes=1, region_token="t", load_threads=1, save_threads=1, save_wait_s=1.5, drain_s=2.0,
)  # fmt: skip

numbers = st.integers(0, 2**53)
groups = st.lists(st.integers(0, 63), max_size=4).map(tuple)
seconds = st.floats(0, 1e6)
messages = st.one_of(
    st.builds(Load, numbers, numbers, groups, st.text()),
    st.builds(Save, numbers, numbers, numbers, groups, st.text(), st.booleans(), st.booleans()),
    st.builds(Use, groups, st.text()),
    st.builds(Cancel, numbers),
    st.just(Ping()),
    st.just(Pong()),
    st.builds(Probe, numbers),
    st.builds(Hello, numbers),
    st.builds(Loaded, numbers, st.text(), groups, st.text(), st.text(), numbers, seconds),
    st.builds(Sealed, numbers),
    st.builds(Saved, numbers, st.text(), groups, st.text(), st.text(), numbers, seconds, numbers),
    st.builds(Probed, numbers, st.text(), st.text()),
    st.builds(Stuck, st.text()),
    st.builds(Note, st.text(), st.text()),
    st.just(CONFIG),
)


@given(st.lists(messages, max_size=5), st.integers(1, 50))
def test_messages_survive_any_split_of_the_stream(sent, size):
    stream = b"".join(map(encode, sent))
    reader = LineReader()
    lines = [line for at in range(0, len(stream), size) for line in reader.feed(stream[at : at + size])]
    assert [decode(line) for line in lines] == sent


@given(st.binary(max_size=200))
def test_garbage_is_one_typed_error(data):
    with pytest.raises(ProtocolError):
        decode(data)


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"type": "nothing"},
        {"type": ["load"]},
        {"type": "cancel"},
        {"type": "cancel", "job": "1"},
        {"type": "cancel", "job": True},
        {"type": "cancel", "job": 1.0},
        {"type": "cancel", "job": 1, "more": 1},
        {"type": "load", "job": 1, "slot": 1, "groups": [1, "2"], "key": ""},
        {"type": "load", "job": 1, "slot": 1, "groups": 1, "key": ""},
        {"type": "save", "job": 1, "slot": 1, "generation": 1, "groups": [], "key": "", "replace": 1, "sealed": True},
    ],
)
def test_wrong_fields_are_refused(value):
    with pytest.raises(ProtocolError):
        decode(json.dumps(value).encode())


def test_deep_nesting_is_refused():
    with pytest.raises(ProtocolError):
        decode(b'{"type":' + b"[" * 100_000)


def test_a_line_has_a_limit():
    reader = LineReader(limit=10)
    assert reader.feed(b"0123456789\n01234") == [b"0123456789"]
    with pytest.raises(ProtocolError):
        reader.feed(b"5678901")
    with pytest.raises(ProtocolError):
        LineReader(limit=10).feed(b"01234567890\n")


def test_what_json_cannot_hold_is_refused_without_showing_it():
    config = Config(**{**CONFIG.__dict__, "storage_options": {"secret": b"s3cr3t"}})
    with pytest.raises(ProtocolError) as caught:
        encode(config)
    assert "s3cr3t" not in str(caught.value)


def test_repr_of_the_configuration_shows_no_secret():
    assert "s3cr3t" not in repr(CONFIG)
    assert "abab" not in repr(CONFIG)
    assert "cdcd" not in repr(CONFIG)

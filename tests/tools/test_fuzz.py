"""The fuzzer finds what it is for, and finds nothing in our readers (`make fuzz` runs it for longer)."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

from fuzz import Reader, finding, main, mutated, readers, run

from tplayout.errors import FormatError, Reason


def read_json_badly(data: bytes) -> None:
    if b"9999" in data:
        raise KeyError("planted")
    raise FormatError(Reason.NOT_A_CHUNK, "planted")


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_only_typed_errors_in_little_memory(reader: Reader) -> None:
    rounds, found = run(reader, 400_000, seed=20261130)
    assert found is None
    assert rounds > 10


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_sound_inputs_are_taken(reader: Reader) -> None:
    """Else nothing behind the first check would ever be reached."""
    for seed in reader.seeds:
        reader.read(seed)


def test_another_error_is_a_finding() -> None:
    rounds, found = run(Reader("bad", [b"{}"], read_json_badly), 1_000_000, seed=1)
    assert found == "KeyError: 'planted'"
    assert run(Reader("bad", [b"{}"], read_json_badly), 1_000_000, seed=1) == (rounds, found)


def test_much_memory_is_a_finding() -> None:
    found = finding(Reader("big", [], lambda data: bytearray(2**25)), b"small", measure=True)
    assert found is not None
    assert "bytes allocated" in found


def test_mutations_differ_and_can_be_made_again() -> None:
    data = bytes(range(200))
    first = [mutated(data, random.Random(n)) for n in range(50)]
    assert first == [mutated(data, random.Random(n)) for n in range(50)]
    assert len(set(first)) > 40


def test_the_command_names_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bytes", "1000", "--seed", "3", "--only", "name"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("name")
    assert "seed 3: only typed errors" in out

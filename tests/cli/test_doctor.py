"""`tplayout doctor`: findings as text and JSON, exit codes."""

from functools import partial

import pytest

from tests.support.tool import ask, call
from tplayout.admin.diagnosis import Finding, Level
from tplayout.cli import doctor

run, asked = partial(call, "doctor"), partial(ask, "doctor")


@pytest.fixture(autouse=True)
def fine(monkeypatch):
    """A machine on which nothing is wrong, whichever runs the tests."""
    monkeypatch.setattr(doctor, "environment", lambda: [Finding("machine", Level.OK, "fine")])


def test_a_sound_store(tmp_path):
    result = run(tmp_path, "--size", "1M")
    assert result.exit_code == 0
    assert "ok    read rate        get of 1 MiB in " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("0 failed, ")
    document = asked(tmp_path, "--no-write")
    assert (document["ok"], document["url"]) == (True, f"file://{tmp_path}")
    assert document["findings"][0] == {
        "topic": "machine",
        "level": "ok",
        "text": "fine",
        "remedy": None,
        "seconds": None,
        "bytes_per_second": None,
    }


def test_without_a_url_only_the_machine_is_looked_at(monkeypatch):
    assert asked()["url"] is None
    monkeypatch.setattr(doctor, "environment", lambda: [Finding("machine", Level.FAIL, "broken", "mend it")])
    result = run()
    assert result.exit_code == 1
    assert "fail  machine          broken\n                       remedy: mend it\n" in result.stdout


def test_keys_that_are_given_are_looked_at(tmp_path):
    (tmp_path / "key").write_text("ab" * 32)
    options = ["--secret-key-file", tmp_path / "key", "--encryption-key-file", tmp_path / "key"]
    assert [one["topic"] for one in asked(*options)["findings"]] == ["machine", "secret", "encryption"]
    (tmp_path / "key").write_text("hunter2")
    result = run(*options)
    assert (result.exit_code, "hunter2" in result.output, "2 failed" in result.stdout) == (1, False, True)


def test_a_store_that_cannot_be_reached():
    arguments = ["s3://bucket/x", "--storage-option", "endpoint_url=http://127.0.0.1:1", "--timeout", "1"]
    result = run(*arguments)
    assert result.exit_code == 3
    assert "fail  reach" in result.stdout
    assert asked(*arguments, code=3)["ok"] is False


def test_a_wrong_url():
    assert run("s3:/bucket").exit_code == 2


def test_a_path_that_is_not_there_is_warned_of_and_not_made(tmp_path):
    document = asked(tmp_path / "a" / "b")
    (finding,) = [each for each in document["findings"] if each["topic"] == "directory"]
    assert finding["level"] == "warn"
    assert str(tmp_path) in finding["text"]
    assert "spelling" in finding["remedy"]
    assert list(tmp_path.iterdir()) == []

"""Options, sizes, ages, and output that several verbs share."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tplayout.cli.common import (
    age,
    confirm,
    emit_json,
    encryption_key_option,
    moment,
    parse_age,
    parse_size,
    parse_storage_options,
    plain,
    secret_option,
    table,
)
from tplayout.errors import ConfigError
from tplayout.key_files import SECRET_ENV


def test_storage_options_nest_and_keep_text():
    given = ["key=123", "anon=true", "config_kwargs.s3.addressing_style=path", "config_kwargs.read_timeout:=5"]
    assert parse_storage_options(given) == {
        "key": "123",
        "anon": True,
        "config_kwargs": {"s3": {"addressing_style": "path"}, "read_timeout": 5},
    }


@pytest.mark.parametrize("item", ["key", "=x", "a..b=1", "a:={", "b.=1"])
def test_wrong_storage_options_are_named(item):
    with pytest.raises(click.BadParameter):
        parse_storage_options([item])


def test_a_storage_option_is_a_value_or_a_table():
    with pytest.raises(click.BadParameter, match="given as a value"):
        parse_storage_options(["a=1", "a.b=2"])


def test_messages_do_not_repeat_a_secret():
    with pytest.raises(click.BadParameter) as caught:
        parse_storage_options(["secret:=hunter2hunter2"])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("500", 500),
        ("64K", 65536),
        ("1.5GiB", 3 << 29),
        ("2 tib", 2 << 40),
        ("0", 0),
        ("10MB", 10**7),
        ("8 G", 8 << 30),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "1e400", "5Q"])
def test_wrong_sizes_and_ages(text):
    with pytest.raises(click.BadParameter):
        parse_size(text)
    with pytest.raises(click.BadParameter):
        parse_age(text)


def test_ages():
    assert [parse_age(text) for text in ("90s", "15m", "12h", "30d", "2w")] == [90, 900, 43200, 2592000, 1209600]
    assert parse_age("0") == 0
    with pytest.raises(click.BadParameter, match="has no unit: write 30s, 30m, 30h or 30d"):
        parse_age("30")
    assert [age(0, now) for now in (5, 200, 9000, 300000)] == ["5 s", "3 min", "2 h", "3 d"]
    assert age(None) == "?"
    assert age(10, 5) == "0 s"
    assert moment(86400.9) == "1970-01-02T00:00:00Z"


def test_what_a_store_says_cannot_steer_the_terminal():
    assert plain("a\x1b[31mb\nsound") == "a\ufffd[31mb\ufffdsound"


def test_tables_in_a_pipe_are_not_folded(capsys):
    table(["name", ">bytes"], [["x" * 300, "1"], ["[red]y", "20"]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "x" * 300 in lines[1]
    assert lines[2].startswith("[red]y")


def test_json_is_one_document(capsys):
    emit_json({"a": ["é", None]})
    assert json.loads(capsys.readouterr().out) == {"a": ["é", None]}


def test_nobody_is_asked_where_nobody_answers(monkeypatch):
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    confirm("Delete?", yes=True)
    with pytest.raises(ConfigError, match="--yes"):
        confirm("Delete?", yes=False)


def test_secret_from_file_or_environment(tmp_path: Path):
    @click.command()
    @secret_option
    def command(secret: bytes | None) -> None:
        click.echo(repr(secret))

    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    file.chmod(0o600)
    runner = CliRunner()
    assert runner.invoke(command, ["--secret-key-file", str(file)]).output == "b'0123456789abcdef'\n"
    environ = {"TPLAYOUT_SECRET_KEY": "s3cr3t of sixteen"}
    assert runner.invoke(command, [], env=environ).output == "b's3cr3t of sixteen'\n"
    assert runner.invoke(command, [], env={"TPLAYOUT_SECRET_KEY": ""}).output == "None\n"
    file.write_text("short\n")
    for arguments, environ, said in (
        (["--secret-key-file", str(tmp_path / "none")], {}, "cannot be read"),
        (["--secret-key-file", str(file)], {}, f"{file} holds a secret of 5 bytes, must have 16 or more"),
        ([], {SECRET_ENV: "short"}, f"{SECRET_ENV} holds a secret of 5 bytes, must have 16 or more"),
        (["--secret-key-file", "/dev/null"], {}, "is empty"),
    ):
        with pytest.raises(ConfigError, match=said):
            runner.invoke(command, arguments, env=environ, catch_exceptions=False)
    environ = {SECRET_ENV: os.fsdecode(b"sixteen bytes or more \xff\xfe")}
    assert runner.invoke(command, [], env=environ).output == "b'sixteen bytes or more \\xff\\xfe'\n"


@pytest.mark.parametrize("option", [secret_option, encryption_key_option])
def test_a_key_file_that_others_can_read_is_used_with_a_warning(tmp_path: Path, option):
    @click.command()
    @option
    def command(**key) -> None:
        click.echo(" ".join(key))

    file = tmp_path / "key"
    file.write_text("ab" * 32)
    file.chmod(0o644)
    (name,) = (name for param in command.params for name in param.opts)
    result = CliRunner().invoke(command, [name, str(file)])
    assert (result.exit_code, result.stdout.strip()) == (0, command.params[0].name)
    assert result.stderr.startswith(f"warning: key file {file} has mode 0644")
    assert len(result.stderr.splitlines()) == 1


PROGRESS = """
import time
from tplayout.cli.common import progress
with progress("verifying") as tick:
    for n in range(4):
        tick(n, 4, n << 20)
        time.sleep(0.15)
"""


def test_progress_is_drawn_on_a_terminal_only():
    assert subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, check=True).stderr == b""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    process = subprocess.Popen([sys.executable, "-c", PROGRESS], stderr=theirs)
    drawn = b""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            drawn += os.read(ours, 65536)
        except BlockingIOError:
            time.sleep(0.02)
    os.close(theirs)
    assert process.returncode == 0
    assert b"verifying" in drawn
    assert b"MiB/s" in drawn
    os.close(ours)

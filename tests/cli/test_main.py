"""The command group: quick help, exit codes, no traceback, whatever a verb does."""

import json
import resource
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result

from tests.support.tool import call
from tplayout.cli import main as main_module
from tplayout.cli.main import EXIT_CODES, VERBS, main, module_of
from tplayout.errors import (
    ConfigError,
    Forbidden,
    FormatError,
    GeometryError,
    NotFound,
    Reason,
    StorageError,
    StorageErrorKind,
    StorageTimeout,
)

HEAVY = ("fsspec", "s3fs", "numpy", "torch", "transformers", "vllm", "rich", "PIL", "matplotlib")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def run_verb(monkeypatch: pytest.MonkeyPatch, function: object) -> Result:
    """`tplayout verb`, where the verb calls function."""
    command = click.Command("verb", callback=function)  # type: ignore[arg-type]
    monkeypatch.setattr(main_module, "VERBS", {"verb": "does it"})
    monkeypatch.setattr(main_module, "import_module", lambda name: SimpleNamespace(command=command))
    return call("verb")


def raising(error: BaseException) -> object:
    def function() -> None:
        raise error

    return function


def test_help_names_the_verbs_and_exit_codes():
    result = call("--help")
    assert result.exit_code == 0
    assert "3    the store cannot be reached" in result.output
    assert all(f"\n  {verb} " in result.output for verb in VERBS)


def test_help_starts_fast():
    """Processor time, which other programs do not change much; best of three."""
    code = "import sys; from tplayout.cli.main import main; main(['--help'])"
    best = 10.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python(code).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best < 0.5


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_nothing_heavy(verb):
    code = f"""
import sys
from tplayout.cli.main import main
try:
    main([*sys.argv[1:], "--help"])
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
    run = python(code, *filter(None, [verb]))
    assert run.returncode == 0
    assert run.stderr.strip() == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_documents_itself(verb):
    command = import_module(f"tplayout.cli.{module_of(verb)}").command
    assert isinstance(command, click.Command)
    result = CliRunner().invoke(main, [verb, "--help"], terminal_width=100)
    assert result.output.count(EXIT_CODES.split("\n")[1]) == 1
    assert "--json" in result.output
    assert "JSON:" in result.output
    for shared in ("--json", "--storage-option", "--secret-key-file", "--encryption-key-file"):
        assert shared in result.output  # as README says of all verbs
    for option in command.params:
        assert not isinstance(option, click.Option) or option.help, option.name


@pytest.mark.parametrize("verb", ["cp", "mv", "import", "convert"])
def test_verbs_that_write_say_what_a_key_does(verb):
    text = " ".join(call(verb, "--help").output.split())
    assert "A key or secret that is given, by option or environment, holds for what is written too" in text


@pytest.mark.parametrize("verb", ["ls", "du", "inspect", "verify", "explain", "gc", "export"])
def test_a_directory_that_is_not_there_is_not_reached(verb, tmp_path):
    tokens, model = tmp_path / "tokens", tmp_path / "model"
    tokens.write_text("1 2 3")
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    options = {"explain": ["--model", str(model), "--tokens", str(tokens)], "export": [str(tmp_path / "file")]}
    result = call(verb, tmp_path / "none", *options.get(verb, ()))
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no such directory" in result.stderr


def test_version():
    result = call("--version")
    assert (result.exit_code, result.output) == (0, "tplayout 0.1.0\n")


@pytest.mark.parametrize("arguments", [["no-such-verb"], ["--no-such-option"]])
def test_wrong_use_is_2(arguments):
    assert call(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (GeometryError("x"), 2),
        (StorageError("x", StorageErrorKind.INVALID_NAME), 2),
        (FileNotFoundError(2, "No such file or directory", "x"), 2),
        (PermissionError(13, "Permission denied", "x"), 3),
        (click.UsageError("x"), 2),
        (NotFound("x"), 1),
        (FormatError(Reason.TRUNCATED, "x"), 1),
        (StorageTimeout("x"), 3),
        (Forbidden("x"), 3),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 1),
        (ZeroDivisionError("x"), 70),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_one_line_and_a_code(monkeypatch, error, code):
    result = run_verb(monkeypatch, raising(error))
    assert result.exit_code == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    if not isinstance(error, click.UsageError):
        assert result.stderr.strip().count("\n") == 0


def test_what_a_verb_returns_is_the_code(monkeypatch):
    assert run_verb(monkeypatch, lambda: 1).exit_code == 1
    assert run_verb(monkeypatch, lambda: None).exit_code == 0


def test_a_reader_that_goes_away_is_no_error():
    code = """
import click
from tplayout.cli import main as module
command = click.Command("v", callback=lambda: [print("line " * 100) for _ in range(10000)] and None)
module.VERBS = {"v": ""}
module.import_module = lambda name: type("M", (), {"command": command})
module.main(["v"])
"""
    shell = f"{sys.executable} -c '{code}' | head -1"
    run = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert run.stdout.startswith("line")
    assert run.stderr == ""

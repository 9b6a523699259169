"""README's Python example does what README says that it does, and what README names is what there is."""

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
import pytest
from safetensors.numpy import save_file

import tplayout
from tplayout.cli.main import EXIT_CODES, VERBS, module_of

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TOOL = README[README.index("\n## Command line tool\n") : README.index("\n## Python API\n")]
EXAMPLE = re.compile(r"<!-- test: api -->\n```python\n(?P<code>(?s:.*?))```\n\n(?P<output>(?:    .*\n)+)")


@pytest.fixture
def my_model(tmp_path: Path) -> Path:
    """A model directory with as little as describe_model needs: 4 KV heads, 2 layers, bfloat16."""
    model = tmp_path / "my-model"
    model.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 128,
        "dtype": "bfloat16",
    }
    (model / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.zeros((8, 8), "f2")}, model / "model.safetensors")
    return model


def test_the_api_example_prints_what_it_says(my_model: Path) -> None:
    found = EXAMPLE.search(README)
    assert found, "README.md has no python block behind <!-- test: api -->, or no output behind it"
    script = my_model.parent / "example.py"
    script.write_text(found["code"])
    run = subprocess.run(
        [sys.executable, script],
        cwd=my_model.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [line.strip() for line in found["output"].splitlines()]


def constant(file: str, name: str) -> object:
    """A literal of a module that only an environment with vLLM can import."""
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no {name}")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading, without its head."""
    lines = README[README.index(f"\n{heading}\n") :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| --- |"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def verb_options() -> dict[str, set[str]]:
    commands = {verb: import_module(f"tplayout.cli.{module_of(verb)}").command for verb in VERBS}
    return {
        verb: {name for param in command.params if isinstance(param, click.Option) for name in param.opts}
        for verb, command in commands.items()
    }


def test_the_connectors_options_are_those_of_the_table() -> None:
    rows = table("### Options of `kv_connector_extra_config`")
    names = constant("connectors/tplayout_vllm/options.py", "_NAMES")
    assert sorted(name for name, *_ in rows) == sorted(f"`{name}`" for name in names)  # type: ignore[attr-defined]


def test_the_metrics_are_those_of_the_table() -> None:
    file = "connectors/tplayout_vllm/metrics.py"
    counters, gauges = constant(file, "COUNTERS"), constant(file, "GAUGES")
    expected = {f"`vllm:tplayout_{name}_total`": text for name, text in counters.items()}  # type: ignore[attr-defined]
    expected |= {f"`vllm:tplayout_{name}`": text for name, text in gauges.items()}  # type: ignore[attr-defined]
    said = dict(table("### Metrics"))
    assert said.pop("`vllm:tplayout_skips_total`") == "Chunks or requests that were not saved or loaded, by `reason`."
    assert said == expected


def test_the_reasons_of_skips_are_those_that_are_counted() -> None:
    rows = table("| `reason` of `vllm:tplayout_skips_total` | what was skipped, and why |")
    said = set(re.findall(r"`((?:request|save|load)-[a-z-]+)(?:-KIND)?`", " ".join(what for what, _ in rows)))
    keying = (ROOT / "connectors/tplayout_vllm/keying.py").read_text()
    saves = (ROOT / "tplayout/staging/saves.py").read_text()
    stops = "".join((ROOT / f"connectors/tplayout_vllm/{name}.py").read_text() for name in ("connector", "scheduler"))
    counted = {f"request-{reason}" for reason in re.findall(r'return "([a-z-]+)"', keying)}
    counted |= {f"request-{reason}" for reason in re.findall(r'\.stop\("([a-z-]+)"\)', stops)}
    counted |= {
        f"save-{reason}"
        for reason in re.findall(r'"(no-slot|backlog|io-down|[a-z]+-stored|in-flight|[a-z]+-again)"', saves)
    }
    assert len(counted) > 13
    assert said == counted | {"save-store", "save-error", "load-error"}


def block(name: str) -> str:
    found = re.search(rf"<!-- test: {name} -->\n```bash\n((?s:.*?))```\n", README)
    assert found, f"README.md has no shell block behind <!-- test: {name} -->"
    subprocess.run(["bash", "-n"], input=found[1], text=True, check=True)
    return found[1]


def test_the_server_of_the_example_has_a_model_and_options_that_are_there() -> None:
    from tools.demo_models import SMOLLM2
    from tplayout_vllm.options import parse_options

    lines = block("server")
    (name,) = re.findall(r"tools/demo_models\.py (\S+)\)", lines)
    assert name in SMOLLM2
    (config,) = re.findall(r"--kv-transfer-config '(\{(?s:.*?)\})'", lines)
    assert parse_options(json.loads(config)["kv_connector_extra_config"], {}).url == "file:///tmp/kv"
    # Programs that run real servers with them.
    programs = ("tools/demo.py", "tools/vllm_server.py", "tests/e2e/test_server_stop.py")
    used = "".join((ROOT / program).read_text() for program in programs)
    words = re.findall(r"--[a-z-]+|\b(?:VLLM|OMP)_[A-Z_]+", lines)
    assert [word for word in words if f'"{word}"' not in used] == []


def test_the_request_of_the_example_is_one_and_its_metrics_are_there() -> None:
    lines = block("request")
    (code,) = re.findall(r"-c '(.*?)'", lines, re.DOTALL)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(json.loads(run.stdout)["prompt"]) > 4000
    (pattern,) = re.findall(r"grep -E '(\S+)'", lines)
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        pytest.skip("NOT TESTED: the names of vLLM's own metrics, since vLLM is not installed")
    theirs = Path(vllm.submodule_search_locations[0], "v1/metrics/loggers.py").read_text()
    for name in ("vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits"):
        assert f'"{name}"' in theirs
        assert f"`{name}_total`" in README
        assert re.match(pattern, f"{name}_total")


def test_the_verbs_are_those_of_the_table_with_their_options() -> None:
    have, named = verb_options(), []
    for what, text in table("## Command line tool"):
        verbs = re.findall(r"`([a-z]+) ", what)
        named += verbs
        for option in re.findall(r"--[a-z-]+", what + text):
            assert all(option in have[verb] for verb in verbs), (verbs, option)
    assert sorted(named) == sorted(VERBS)


def test_every_option_of_the_tool_that_is_named_is_there() -> None:
    there = {"--help"}.union(*verb_options().values())
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TOOL)) <= there
    for verb, rest in re.findall(r"^    \$ tplayout ([a-z]+)(.*)$", TOOL, re.MULTILINE):
        assert set(re.findall(r"--[a-z-]+", rest)) <= verb_options()[verb], (verb, rest)


def test_the_exit_codes_are_those_of_the_help() -> None:
    sentence = TOOL[TOOL.index("Exit codes:") :].split(". ")[0]
    said = re.findall(r"[;:]\s(\d+)\s", sentence)
    assert said == re.findall(r"^  (\d+)  ", EXIT_CODES, re.MULTILINE)


def test_the_calls_of_the_api_have_these_parameters() -> None:
    rows = table("## Python API")
    calls = [re.fullmatch(r"`(?:[Cc]ache\.)?(\w+)\((.*)\)`", what) for what, _ in rows]
    assert all(calls)
    for call in filter(None, calls):
        owner = tplayout if call[1] in ("describe_model", "open_store") else tplayout.Cache
        parameters = inspect.signature(getattr(owner, call[1])).parameters
        for name, default in re.findall(r"(\w+)=([^,]+)", call[2]):
            assert repr(parameters[name].default) == default.replace('"', "'"), (call[1], name)


def test_make_targets_and_extras_that_are_named_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:`|    )make ([a-z0-9-]+)", README)) <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"tplayout\[(\w+)\]", README)) <= extras.keys()


def test_places_that_the_documents_name_are_there() -> None:
    for document in ("README.md", "ARCHITECTURE.md", "FORMAT.md"):
        text = (ROOT / document).read_text()
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
        paths = re.findall(r"`((?:tplayout|connectors|tools|tests|docs)/[\w./]*)`", text)
        assert not [path for path in {*links, *paths} if not (ROOT / path).exists()], document

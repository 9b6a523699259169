"""Rules about the source itself: which module may import what, and what no file may contain."""

import ast
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tplayout

ROOT = Path(__file__).resolve().parent.parent

# Imports go from right to left only. Connectors stand behind the last one.
ORDER = [
    "errors",
    "arguments",
    "memory",
    "format",
    "key_files",
    "storage",
    "weights",
    "model_groups",
    "model",
    "cache",
    "staging",
    "admin",
    "cli",
]
ENGINES = {"vllm", "sglang", "tensorrt_llm", "lmcache", "mooncake"}
IO_MODULES = {
    "asyncio",
    "concurrent",
    "fcntl",
    "http",
    "io",
    "logging",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib",
}
FORMAT_REQUIREMENTS = {"blake3", "xxhash"}
NEVER = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=name(file))


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names of what is imported; with `lazy` inside functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute, so that they can be checked"
            assert child.module is not None
            yield child.module
            # `from tplayout import errors` names a module too.
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif not is_for_types_only(child) and (
            lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        ):
            yield from imports(child, lazy=lazy)


def roots(file: Path, *, lazy: bool = True) -> set[str]:
    return {module.partition(".")[0] for module in imports(tree(file), lazy=lazy)}


PARTS = {file.stem for file in (ROOT / "tplayout").iterdir() if file.is_dir() or file.suffix == ".py"} - {"__init__"}


def parts_used(file: Path) -> set[str]:
    """The parts of the package that a file imports from."""
    dotted = [module.split(".") for module in imports(tree(file))]
    return {names[1] for names in dotted if names[0] == "tplayout" and len(names) > 1 and names[1] in PARTS}


@pytest.mark.parametrize("file", sources("tplayout"), ids=name)
def test_imports_point_one_way(file):
    own = file.relative_to(ROOT / "tplayout").parts[0].removesuffix(".py")
    if own == "__init__":
        own = "cli"  # may offer what any part has
    assert own in ORDER, f"{name(file)}: put {own!r} into ORDER of this test, where its imports allow"
    wrong = {part for part in parts_used(file) if ORDER.index(part) > ORDER.index(own)}
    assert not wrong, f"{name(file)} imports {sorted(wrong)}, which stand above it in {ORDER}"


@pytest.mark.parametrize("file", sources("tplayout/format"), ids=name)
def test_the_format_does_no_io(file):
    used = roots(file)
    third_party = used - sys.stdlib_module_names - {"tplayout"}
    assert third_party <= FORMAT_REQUIREMENTS
    assert not used & IO_MODULES
    called = {ast.unparse(node.func) for node in ast.walk(tree(file)) if isinstance(node, ast.Call)}
    assert not called & {"open", "print", "input", "exec", "eval"}


# Programs that are an engine's process, write test data with its own code, or measure a connector within it.
OF_ENGINES = {
    ROOT / "tools" / path
    for path in ("vllm_engine_driver.py", "peer_files.py", "bench/timed_connector.py", "bench/traced_connector.py")
}


@pytest.mark.parametrize("file", sorted({*sources("tplayout", "tools")} - OF_ENGINES), ids=name)
def test_only_connectors_import_an_engine(file):
    assert not roots(file) & ENGINES


@pytest.mark.parametrize("file", sources("tplayout"), ids=name)
def test_the_library_imports_no_connector(file):
    assert not [root for root in roots(file) if root.startswith("tplayout_")]


@pytest.mark.parametrize("file", sources("tplayout"), ids=name)
def test_torch_is_imported_only_when_an_array_is_asked_for(file):
    assert not roots(file, lazy=False) & {"torch", "transformers"}


@pytest.mark.parametrize("file", sources("tplayout/staging"), ids=name)
def test_staging_knows_no_torch(file):
    assert not roots(file) & {"torch", "transformers", "numpy"}


def test_an_io_process_loads_neither_torch_nor_an_engine():
    """It starts in a fraction of a second, and holds no memory of theirs."""
    heavy = sorted(ENGINES | {"torch", "transformers"})
    code = f"import sys, tplayout.staging.io_process; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("file", sources("tplayout", "connectors"), ids=name)
def test_no_pickle_and_no_multiprocessing(file):
    assert not roots(file) & NEVER


def test_the_plug_in_hook_imports_nothing_heavy():
    """vLLM runs it in every process that it starts, with or without this connector."""
    hook = ROOT / "connectors" / "tplayout_vllm" / "__init__.py"
    assert roots(hook, lazy=False) <= sys.stdlib_module_names


@pytest.mark.parametrize("file", sources("tplayout", "connectors", "tools", "tests"), ids=name)
def test_every_file_says_its_role(file):
    assert ast.get_docstring(tree(file)), f"{name(file)} starts with no docstring"


def modules(folder: Path) -> dict[str, set[str]]:
    """The modules of one source folder: dotted name -> what each imports."""
    base = ROOT / "connectors" if folder.is_relative_to(ROOT / "connectors") else ROOT
    files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
    return {".".join(file.relative_to(base).with_suffix("").parts): set(imports(tree(file))) for file in files}


def reached_by_tests(folder: Path) -> set[str]:
    """Modules of a folder that have a test_*.py, are imported by its tests, or serve a module that is reached.

    Helpers beside the tests count as tests.
    """
    base = ROOT / "connectors" if folder.is_relative_to(ROOT / "connectors") else ROOT / "tplayout"
    tests = list((ROOT / "tests" / folder.relative_to(base)).glob("*.py"))
    used = modules(folder)
    stems = {file.stem.removeprefix("test_") for file in tests}
    reached = {module for module in used if module.rpartition(".")[2] in stems}
    todo = set().union(reached, *(imports(tree(file)) for file in tests)) & used.keys()
    reached = set()
    while todo:
        module = todo.pop()
        reached.add(module)
        todo |= (used[module] & used.keys()) - reached
    return reached


FOLDERS = sorted({file.parent for file in sources("tplayout", "connectors")})


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_every_module_is_tested_where_the_mirror_says(folder):
    """The tests of tplayout/format are in tests/format, and so on."""
    untested = sorted(modules(folder).keys() - reached_by_tests(folder))
    assert not untested


def test_no_test_folder_is_a_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_version_is_stated_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == tplayout.__version__


def test_changelog_speaks_of_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in changelog or f"## {tplayout.__version__}" in changelog


def tracked() -> Iterator[tuple[str, str]]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for path in filter(None, listing.decode().split("\0")):
        data = (ROOT / path).read_bytes() if (ROOT / path).is_file() else b""
        if b"\0" not in data and not path.startswith("tests/data/"):  # raw values of other caches
            yield path, data.decode()


needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="NOT TESTED: what published files name, since only git tells which they are"
)


@needs_git
def test_no_tracked_file_names_a_path_of_this_machine():
    everywhere = {Path(p) for p in ("/", "/home", "/opt", "/srv", "/usr", "/usr/local", "/var", tempfile.gettempdir())}
    own = {ROOT, ROOT.parent, Path.home(), Path(sys.prefix)} - everywhere
    found = [f"{path}: {place}/" for path, text in tracked() for place in own if f"{place}/" in text]
    assert not found


@needs_git
def test_no_tracked_file_names_a_package_index():
    """People install from the index that their pip is set up for."""
    hosts = re.compile(r"(pypi|pythonhosted|pytorch|npmjs)\.(org|com)/(simple|packages|whl)|download\.pytorch")
    this = name(Path(__file__))
    assert not [path for path, text in tracked() if path != this and hosts.search(text)]


SKIPS = {f"pytest.{call}" for call in ("skip", "importorskip", "mark.skip", "mark.skipif", "xfail", "mark.xfail")}


def test_a_skipped_test_says_what_is_not_shown():
    """What `make setup` installs is imported, so that a test without it fails; nothing is left out in silence."""
    calls = [
        (f"{name(file)}:{node.lineno}", ast.unparse(node))
        for file in sources("tests")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in SKIPS
    ]
    assert not [place for place, text in calls if "NOT TESTED: " not in text]

"""Verbs on stores of which any call may break: once they say that they are done, they are; and nothing is ever lost."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from tests.support.sample_stores import TOKENS, store_prompts
from tests.support.tool import ask, call
from tools.fault_store import Fault
from tools.faulty_files import APPLICABLE, FaultyFiles, Rates, spread

OTHER = [9] * 8
SOUND_WRITES = set(Fault) - {Fault.FLIPPED_BIT}  # a store that damages what it is given, and says that all is well


class Place:
    """Two stores on files that break, and the same files as they are."""

    def __init__(self, root: Path) -> None:
        self.source, self.target = root / "source", root / "target"
        self.name = store_prompts(self.source, TOKENS, OTHER)
        self.faults = FaultyFiles(root / "faults")
        control = f"control={self.faults.storage_options['control']}"
        self.seed, self.rates = 0, spread(0)
        # One job, so that each run of the tests is the same.
        self.options = ["--storage-option", control, "--timeout", "0.3", "--jobs", "1"]

    def break_it(self, rates: Rates, seed: int) -> None:
        """What breaks in the runs to come, other calls in each."""
        self.rates, self.seed = rates, 1000 * seed

    def run(self, *arguments: object) -> Result:
        """A verb, which ends by itself, with an answer or one line."""
        self.seed += 1
        self.faults.inject(self.rates, self.seed, delay_s=0.01)
        result = call(*arguments)
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code in (0, 1, 3), result.output
        return result

    @staticmethod
    def faulty(path: Path) -> str:
        return f"faulty+file://{path}"

    def until_done(
        self,
        *arguments: object,
        check: Callable[[], None] = lambda: None,
        done: Callable[[Result], bool] = lambda result: False,
    ) -> Result:
        """Run a verb until its exit code is 0. check: after each run. done: whether another answer ends it too."""
        for _ in range(60):
            result = self.run(*arguments, *self.options)
            check()
            if result.exit_code == 0 or done(result):
                return result
        raise AssertionError(f"never done: {result.output}")


def names(store: Path) -> set[str]:
    return {path.name for path in store.rglob("*.safetensors")}


def sound(store: Path) -> set[str]:
    """Chunk objects that verification finds nothing against."""
    if not any(store.rglob("namespace.json")):
        return set()
    result = ask("verify", store, code=call("verify", store).exit_code)
    bad = {Path(finding["object"]).name for finding in result["findings"] if finding["damage"]}
    return names(store) - bad


@pytest.fixture(scope="module")
def events() -> Counter[tuple[str, Fault]]:
    """Faults of all tests together."""
    return Counter()


@pytest.fixture
def place(tmp_path: Path, events: Counter[tuple[str, Fault]]) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    events.update(place.faults.injected())


@pytest.mark.parametrize("seed", range(12))
def test_cp(place: Place, seed: int) -> None:
    document = place.target / place.name / "namespace.json"

    def person() -> None:
        """Does what the error says: this document gives the others their meaning, and no tool replaces it."""
        if str(document.relative_to(place.target)) in place.faults.damaged(place.target):
            document.unlink()

    place.break_it(spread(0.1), seed)
    place.until_done("cp", place.faulty(place.source), place.faulty(place.target), check=person)
    assert names(place.target) == names(place.source) == sound(place.source)
    damaged = {Path(name).name for name in place.faults.damaged(place.target)}
    assert sound(place.target) == names(place.target) - damaged


@pytest.mark.parametrize("seed", range(6))
def test_mv_loses_nothing(place: Place, seed: int) -> None:
    everything = names(place.source)

    def nothing_is_lost() -> None:
        assert sound(place.source) | sound(place.target) == everything

    place.break_it(spread(0.08, faults=SOUND_WRITES), seed)
    place.until_done(
        *("mv", place.faulty(place.source), place.faulty(place.target), "--yes"),
        check=nothing_is_lost,
        # The run before has deleted the last of it, and been told that this failed.
        done=lambda result: "no namespace is stored here" in result.stderr and not any(place.source.rglob("*.json")),
    )
    assert sound(place.target) == everything
    assert not names(place.source)


@pytest.mark.parametrize("seed", range(6))
def test_gc_keeps_what_it_is_told_to_keep(place: Place, seed: int, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(" ".join(map(str, OTHER)))
    store_prompts(tmp_path / "kept", OTHER)
    kept = names(tmp_path / "kept")
    place.break_it(spread(0.2), seed)
    arguments = ["gc", place.faulty(place.source), "--max-bytes", "0", "--keep-tokens", tmp_path / "tokens"]
    for _ in range(20):
        place.run(*arguments, "--grace", "0", "--yes", *place.options)
        assert kept <= sound(place.source)
        if names(place.source) == kept:
            break
    assert names(place.source) == kept


@pytest.mark.parametrize("seed", range(6))
def test_looking_changes_nothing(place: Place, seed: int) -> None:
    before = {path: path.read_bytes() for path in place.source.rglob("*") if path.is_file()}
    place.break_it(spread(0.3), seed)
    for verb in ("ls", "du", "inspect", "verify"):
        jobs = place.options if verb == "verify" else place.options[:-2]
        place.run(verb, place.faulty(place.source), *jobs)
    assert {path: path.read_bytes() for path in place.source.rglob("*") if path.is_file()} == before


def test_every_fault_of_every_call_was_met(place: Place, events: Counter[tuple[str, Fault]]) -> None:
    """In the tests above; what was not, breaks runs that are only to end by themselves."""
    missing = {(method, fault) for method, faults in APPLICABLE.items() for fault in faults} - set(events)
    for turn in range(100):
        missing -= set(place.faults.injected())
        if not missing:
            return
        store_prompts(place.source, TOKENS, OTHER)
        place.break_it({method: {fault.value: 0.5} for method, fault in sorted(missing)}, turn)
        target = place.faulty(place.target / str(turn))
        place.run("mv", place.faulty(place.source), target, "--yes", *place.options)
    raise AssertionError(missing)

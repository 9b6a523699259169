"""FORMAT.md and the tests hold each other: every numbered MUST has a test, every citation a MUST."""

import re
from pathlib import Path

from tplayout.errors import Reason

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "FORMAT.md").read_text()
NUMBER = re.compile(r"\[M(\d+)\]")


def cited() -> set[int]:
    sources = (path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return {int(number) for source in sources for number in NUMBER.findall(source)}


def test_musts_are_numbered_without_gaps() -> None:
    numbers = [int(number) for number in NUMBER.findall(TEXT)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_must_has_a_number() -> None:
    head = TEXT.index("## 2.")
    items = re.findall(r"^- \[M\d+\] .*(?:\n  .*)*", TEXT[head:], re.MULTILINE)
    rest = TEXT[head:]
    for item in items:
        assert "MUST" in item, item
        rest = rest.replace(item, "")
    assert "MUST" not in rest


def test_every_must_is_cited_by_a_test() -> None:
    missing = {int(number) for number in NUMBER.findall(TEXT)} - cited()
    assert not missing, f"no test cites {sorted(missing)}"


def test_no_test_cites_a_must_that_is_not_there() -> None:
    assert cited() <= {int(number) for number in NUMBER.findall(TEXT)}


def test_every_reason_is_in_the_text() -> None:
    for reason in Reason:
        assert f"`{reason}`" in TEXT, reason

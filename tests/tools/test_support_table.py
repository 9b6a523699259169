"""README's table of what works where says what the tests say."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from support_table import BEGIN, END, Case, collect, main, replaced, table  # noqa: E402

WORKS = Case("fp8", "TP 1 → 2", "works", "tests/e2e/test_fp8.py", True)
SLOW = Case("fp8", "TP 2 → 1", "works", "tests/e2e/test_fp8.py", False)
REFUSED = Case("fp8", "a scale a head", "refused", "tests/e2e/test_refused.py", True)


def test_cases_of_a_row_are_one_line_and_refusals_another() -> None:
    shown = table([WORKS, SLOW, WORKS, REFUSED], ["fp8"])
    assert shown.splitlines()[2:] == [
        "| fp8 | works | TP 1 → 2<br>TP 2 → 1 * | [test_fp8](tests/e2e/test_fp8.py) |",
        "| fp8 | refused | a scale a head | [test_refused](tests/e2e/test_refused.py) |",
    ]


def test_a_row_without_a_test_and_a_test_without_a_row_are_errors() -> None:
    with pytest.raises(ValueError, match=r"no test shows .'LoRA'"):
        table([WORKS], ["fp8", "LoRA"])
    with pytest.raises(ValueError, match=r"the table does not have: .'fp8'"):
        table([WORKS], [])


def test_only_what_is_between_the_marks_is_replaced() -> None:
    assert replaced(f"a\n{BEGIN}old\n{END}b\n", "new\n") == f"a\n{BEGIN}new\n{END}b\n"
    with pytest.raises(ValueError, match=r"README\.md has no"):
        replaced("a\nb\n", "new\n")


def test_readme_has_the_table_of_these_tests(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    assert replaced(readme, table(collect())) == readme, "run: python tools/support_table.py --write"
    assert main([]) == 0
    assert capsys.readouterr().out in readme

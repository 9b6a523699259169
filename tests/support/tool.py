"""The tool as people and programs call it, in this process."""

import json
from typing import Any

from click.testing import CliRunner, Result

from tplayout.cli.main import main


def call(*arguments: object) -> Result:
    """`tplayout ARGUMENTS`, to its end."""
    return CliRunner().invoke(main, [*map(str, arguments)])


def ask(*arguments: object, code: int = 0) -> dict[str, Any]:
    """`tplayout ARGUMENTS --json`: its document, once it ended with `code`."""
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def refused(*arguments: object, code: int = 2) -> str:
    """The one line with which `tplayout ARGUMENTS` ended, with `code` and no answer."""
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr

"""`tplayout mv`: like cp, and what has arrived is deleted from the source."""

from typing import Any

import click

from tplayout.cli.common import yes_option
from tplayout.cli.copying import EPILOG, copy_options, run


@click.command("mv", epilog=EPILOG)
@copy_options
@yes_option
def command(source: str, destination: str, **options: Any) -> int:
    """Move a store, a namespace, or the prefixes of prompts from SRC to DST, two store URLs.

    Everything is copied and verified first; what is at DST already is verified too. Then it is deleted from SRC, tails
    before heads. Damaged objects, and chunks that other prefixes of SRC share, stay there.
    """
    return run(source, destination, options, move=True)

"""`tplayout cp`: stores, namespaces or prefixes from one store to another."""

from typing import Any

import click

from tplayout.cli.copying import EPILOG, copy_options, run


@click.command("cp", epilog=EPILOG)
@copy_options
@click.option("--recheck", is_flag=True, help="Verify what is at the destination already, and replace what is damaged.")
def command(source: str, destination: str, **options: Any) -> int:
    """Copy a store, a namespace, or the prefixes of prompts from SRC to DST, two store URLs.

    Every object is verified before it is written; damaged ones are named and left out. What is at DST with the right
    size is skipped, so a run that was cut short is continued by running it again.
    """
    return run(source, destination, options, move=False)

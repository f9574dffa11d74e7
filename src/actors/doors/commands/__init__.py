"""The command line. Each module holds a group of commands; `cli` assembles them."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Where only the Python client is installed, exit with status 2 and say
    which packages to add."""
    try:
        from actors.doors.commands.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("actors"):
            raise
        print(
            f"penstock: the command needs the service's packages ({error}):"
            " pip install 'penstock-views[server]'",
            file=sys.stderr,
        )
        sys.exit(2)
    run()

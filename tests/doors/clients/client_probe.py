"""Prints the results of a client program, one line per capability, for the test that started it.

Uses only the standard library: the programs run in the clients' environment, without the service.
The parts of a line are separated by tabs: ``client NAME VERSION``, then for each capability
(`capabilities`) ``yes KEY``, ``no KEY REASON`` or ``lacks KEY REASON``.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

REASON_CHARACTERS_MAX = 200


class ClientProbe:
    """Prints the results of one client."""

    def __init__(self, name: str, version: str) -> None:
        """Print the client's name and version."""
        self._tell("client", name, version)

    @contextmanager
    def tries(self, capability: str) -> Iterator[None]:
        """Print whether the block succeeded; its error goes to stderr."""
        begun = time.monotonic()
        try:
            yield
        # Whatever goes wrong is the answer to what was asked.
        except Exception as error:  # noqa: BLE001
            print(f"-- {capability}", file=sys.stderr)
            traceback.print_exc()
            self._tell("no", capability, reason_of(error))
        else:
            self._tell("yes", capability)
        finally:
            print(f"{capability}: {time.monotonic() - begun:.1f} s", file=sys.stderr)

    def lacks(self, capability: str, reason: str) -> None:
        """Print that the client itself does not have a capability."""
        self._tell("lacks", capability, reason)

    def _tell(self, *parts: str) -> None:
        print("\t".join(parts), flush=True)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "it does not give what was wanted"
    # The state says nothing to a reader of the page.
    text = text.partition(" SQLSTATE:")[0].replace("\t", " ")
    return f"{type(error).__name__}: {text}"[:REASON_CHARACTERS_MAX]


def check(found: object, wanted: object) -> None:
    """Raise `AssertionError` with the first difference if two values are not equal."""
    if found == wanted:
        return
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if one != other:
                raise AssertionError(f"row {place} is {one!r} and not {other!r}")
    raise AssertionError(f"found {str(found)[:200]!r} and not {str(wanted)[:200]!r}")

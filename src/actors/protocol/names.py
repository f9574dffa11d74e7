"""Names of objects and columns: any text that Spark can quote, compared without regard to case.

A name keeps the spelling it was given; `fold` is what it is compared by, as Spark compares.
"""

from __future__ import annotations

from typing import Final

from actors.errors import InvalidUsage
from actors.protocol.relations import refuse_relation

NAME_CHARACTERS_MAX: Final = 128


def fold(name: str) -> str:
    """Return the form by which a name is compared."""
    return name.lower()


def check_name(what: str, name: str) -> str:
    """Return the name. Raises `InvalidUsage` when it is empty, too long, reserved, or holds
    characters that are not printed."""
    refuse_relation(name, what)
    if not name or name != name.strip() or not name.isprintable():
        raise InvalidUsage(
            f"{what} {name!r} is not a valid name: it must not be empty, begin or end with a "
            f"space, or hold line breaks or other characters that are not printed"
        )
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidUsage(
            f"{what} {name[:32]!r}… has {len(name)} characters; the limit is {NAME_CHARACTERS_MAX}"
        )
    if name.startswith("__"):
        raise InvalidUsage(f"{what} {name!r}: names that start with '__' belong to the system")
    return name

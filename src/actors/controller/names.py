"""Names of objects and columns: valid identifiers, compared without regard to case.

A name keeps the spelling it was given; `fold` is what it is compared by, as Spark compares.
"""

from __future__ import annotations

import re
from typing import Final

from actors.errors import InvalidUsage
from actors.protocol.relations import refuse_relation

NAME_CHARACTERS_MAX: Final = 128
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


def fold(name: str) -> str:
    """What a name is compared by."""
    return name.lower()


def check_name(what: str, name: str) -> str:
    """The name itself. Raises `InvalidUsage` when it is not an identifier or is reserved."""
    refuse_relation(name, what)
    if not _IDENTIFIER.match(name):
        raise InvalidUsage(
            f"{what} {name!r} is not a valid name: a letter or underscore, then letters, digits "
            f"and underscores"
        )
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidUsage(
            f"{what} {name[:32]!r}… has {len(name)} characters; the limit is {NAME_CHARACTERS_MAX}"
        )
    if name.startswith("__"):
        raise InvalidUsage(f"{what} {name!r}: names that start with '__' belong to the system")
    return name

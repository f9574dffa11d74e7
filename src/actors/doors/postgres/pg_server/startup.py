"""The variables that a client sets as it connects. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from actors.model.pgwire.decoder import split_options
from actors.runtime.errors import InvalidUsage


def startup_variables(parameters: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the variables that a startup packet sets, those of its `options` too.

    >>> startup_variables({"user": "me", "application_name": "psql", "options": "-c a=1 --b-c=2"})
    [('application_name', 'psql'), ('a', '1'), ('b_c', '2')]

    Raises:
        InvalidUsage: It asks for something else.
    """
    if parameters.get("replication", "off").lower() not in ("off", "false", "no", "0"):
        raise InvalidUsage("replication connections are not supported: leave replication out")
    found = [
        (name, value)
        for name, value in parameters.items()
        if name not in ("user", "database", "options", "replication")
        and not name.startswith("_pq_.")
    ]
    words = split_options(parameters.get("options", ""))
    while words:
        word = words.pop(0)
        if word == "-c" and words:
            word = "--" + words.pop(0)
        name, equals, value = word.removeprefix("--").removeprefix("-c").partition("=")
        if not word.startswith(("--", "-c")) or not equals or not name:
            raise InvalidUsage(f"invalid startup option {word[:64]!r}: expected -c name=value")
        found.append((name.replace("-", "_"), value))
    return found

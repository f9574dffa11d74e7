"""The variables that a client sets as it connects. Pure."""

from __future__ import annotations


def startup_variables(parameters: dict[str, str] | object) -> list[tuple[str, str]]:
    """Return the variables that a startup packet sets, those of its `options` too.

    >>> startup_variables({"user": "me", "application_name": "psql", "options": "-c a=1 --b-c=2"})
    [('application_name', 'psql'), ('a', '1'), ('b_c', '2')]
    """
    assert isinstance(parameters, dict)
    found = [
        (name, value)
        for name, value in parameters.items()
        if name not in ("user", "database", "options", "replication")
        and not name.startswith("_pq_.")
    ]
    words = parameters.get("options", "").split()
    while words:
        word = words.pop(0)
        if word == "-c" and words:
            word = "--" + words.pop(0)
        if word.startswith(("--", "-c")):
            name, equals, value = word.removeprefix("--").removeprefix("-c").partition("=")
            if equals:
                found.append((name.replace("-", "_"), value))
    return found

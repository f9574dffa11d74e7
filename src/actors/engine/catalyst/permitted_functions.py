"""The functions and constructs of Spark SQL that reach nothing outside a query. Pure.

Everyone who may run queries may use these. Everything else is for administrators: it may open a
file or an address, run code, or reveal facts about the service's machine. The lists name classes of
Spark, since a name may denote another function in a user's Spark. They are made from Spark's own
registries, for every release that the service runs on (`permitted_functions.txt`). A test compares
them, and fails when a release has a function that is in none of the lists. Whoever adds a function
to a list must have checked what it does.

`StatementInspector.java` checks statements against them, both as parsed and as analysed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CATALYST: Final = "org.apache.spark.sql.catalyst."
REFUSED_OPTIONS: Final = frozenset({"rowvalidationxsdpath"})
"""Options of functions that name a file, in lower case."""


def _sections(text: str) -> dict[str, dict[str, frozenset[str]]]:
    """Return the classes in each section of the lists, with the names of their functions."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    section: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = found[line.strip("[]")] = {}
        elif not line.startswith("#"):
            for entry in line.split():
                # A name may be that of an operator: `EqualTo==,=`.
                kind, _, names = entry.partition("=")
                section[_CATALYST + kind] = frozenset(names.split(",")) - {""}
    return found


def _names(classes: dict[str, frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*classes.values())


_LISTS: Final = _sections(Path(__file__).with_suffix(".txt").read_text())
FUNCTIONS: Final = _LISTS["functions"]
"""Names of permitted functions, by the class that Spark's registry has for them."""
TABLE_FUNCTIONS: Final = _LISTS["table functions"]
REFUSED_FUNCTIONS: Final = _LISTS["refused functions"]
REFUSED_TABLE_FUNCTIONS: Final = _LISTS["refused table functions"]
FUNCTION_NAMES: Final = _names(FUNCTIONS)
TABLE_FUNCTION_NAMES: Final = _names(TABLE_FUNCTIONS)
REFUSED_NAMES: Final = _names(REFUSED_FUNCTIONS) | _names(REFUSED_TABLE_FUNCTIONS)
NODES: Final = frozenset({*FUNCTIONS, *_LISTS["expressions"], *_LISTS["operators"]})
"""Classes of all nodes that the tree of a query may have, before and after its analysis."""


def is_permitted_function(name: str) -> bool:
    """Return whether everyone may call Spark's own function of this name.

    >>> is_permitted_function("UPPER"), is_permitted_function("java_method")
    (True, False)
    """
    return name.lower() in FUNCTION_NAMES


def is_permitted_table_function(name: str) -> bool:
    """Return whether everyone may call Spark's own table function of this name.

    >>> is_permitted_table_function("range"), is_permitted_table_function("python_worker_logs")
    (True, False)
    """
    return name.lower() in TABLE_FUNCTION_NAMES


def refusal_of(kind: str, name: str) -> str:
    """Return the error text for something that is not permitted. `kind`: "function", "option" (of a
    function) or "construct".

    >>> refusal_of("function", "reflect")
    'permission denied for function reflect: only administrators may use it, since it can reach \
outside of the query'
    """
    return (
        f"permission denied for {kind} {name}: only administrators may use it, since it can reach "
        "outside of the query"
    )

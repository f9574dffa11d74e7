"""The functions and constructs of Spark SQL that reach nothing outside of a query. Pure.

Everybody who may run a query may use these. What is not among them is for administrators: it may
open a file or an address, call code, or tell of the service's machine. The lists name classes of
Spark, since a name may stand for another function in a user's Spark. They are made from Spark's
own registries, of every release that the service runs on (`permitted_functions.txt`): a test
compares them, and fails when a release has a function that is in none of them. Whoever adds it
there has looked at what it does.

`StatementInspector.java` compares statements with them, as they are parsed and as they are
analysed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CATALYST: Final = "org.apache.spark.sql.catalyst."
REFUSED_OPTIONS: Final = frozenset({"rowvalidationxsdpath"})
"""Options of functions that name a file, in lower case."""


def _sections(text: str) -> dict[str, dict[str, frozenset[str]]]:
    """Return the classes of each section of the lists, and the names of their functions."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    section: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = found[line.strip("[]")] = {}
        elif not line.startswith("#"):
            for entry in line.split():
                # A name may be an operator's: `EqualTo==,=`.
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
"""Classes of all nodes that a query's tree may have, before and after its analysis."""


def is_permitted_function(name: str) -> bool:
    """Return whether everybody may call a function of Spark's own by this name.

    >>> is_permitted_function("UPPER"), is_permitted_function("java_method")
    (True, False)
    """
    return name.lower() in FUNCTION_NAMES


def is_permitted_table_function(name: str) -> bool:
    """Return whether everybody may call a function of Spark's own as a table.

    >>> is_permitted_table_function("range"), is_permitted_table_function("python_worker_logs")
    (True, False)
    """
    return name.lower() in TABLE_FUNCTION_NAMES


def refusal_of(kind: str, name: str) -> str:
    """Return the text of the error for what is not permitted: a "function", an "option" of one, or
    another "construct".

    >>> refusal_of("function", "reflect")
    'permission denied for function reflect: only administrators may use it, since it can reach \
outside of the query'
    """
    return (
        f"permission denied for {kind} {name}: only administrators may use it, since it can reach "
        "outside of the query"
    )

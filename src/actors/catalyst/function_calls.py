"""Functions of Catalyst's expression classes: their names in SQL, and which settings a call keeps.

A call's text says its arguments only. A field of the class that is no argument (a *setting*)
must have the value that Spark gives it when it analyses that text: `check_settings` refuses any
other, so that a variant of a function is never written as the plain one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

from actors.catalyst.literals import NotRendered
from actors.catalyst.plan_tree import TreeNode

_PACKAGE: Final = "org.apache.spark.sql.catalyst.expressions."
_BUILDERS: Final = ("ExpressionBuilder", "Builder")
_NAMES: Final = {
    # several names of one class: the one without a grammar of its own
    "BoolAnd": "bool_and",
    "BoolOr": "bool_or",
    "DateAdd": "date_add",
    "StringLocate": "locate",
    "CreateNamedStruct": "named_struct",
    # classes that a builder of another name makes
    "Extract": "date_part",
    "DatePart": "date_part",
    "StringLPad": "lpad",
    "StringRPad": "rpad",
    "CounterDiffWithStartTime": "counter_diff",
    "RoundCeil": "ceil",
    "RoundFloor": "floor",
    "StringInstr": "instr",
    "StringInstrWithOccurrence": "instr",
}
"""Names that do not follow from the registry, by class."""
TRY_NAMES: Final = {
    "Add": "try_add",
    "Subtract": "try_subtract",
    "Multiply": "try_multiply",
    "Divide": "try_divide",
    "Remainder": "try_mod",
    "Sum": "try_sum",
    "Average": "try_avg",
}
"""Functions for classes whose evaluation mode is TRY."""
_MODES: Final = frozenset({"evalMode", "evalContext", "failOnError", "ansiEnabled"})
"""Settings that the session's ANSI mode gives, unless a function of its own (try_…) was called."""
_SET_BY_SPARK: Final = frozenset(
    {
        # the session's, which is that of the text, too
        "timeZoneId",
        "zoneId",
        # places in a buffer, chosen when a query is executed
        "mutableAggBufferOffset",
        "inputAggBufferOffset",
    }
)
_USUAL: Final[dict[tuple[str, str], Any]] = {
    ("ArrayExists", "followThreeValuedLogic"): True,
    ("ArrayInsert", "legacyNegativeIndex"): False,
    ("ArraySort", "allowNullComparisonResult"): False,
    ("Base64", "chunkBase64"): True,
    ("CollectList", "ignoreNulls"): True,
    ("CollectSet", "ignoreNulls"): True,
    ("CollectUnion", "ignoreNulls"): True,
    ("CreateArray", "useStringTypeWhenEmpty"): False,
    ("CreateMap", "useStringTypeWhenEmpty"): False,
    ("Encode", "legacyCharsets"): False,
    ("Encode", "legacyErrorAction"): False,
    ("JsonToStructs", "variantAllowDuplicateKeys"): False,
    ("Murmur3Hash", "seed"): 42,
    ("PercentileDisc", "legacyCalculation"): False,
    ("ToBinary", "nullOnInvalidFormat"): False,
    # These two raise errors only as parts of other functions, whatever the session's mode.
    ("UnBase64", "failOnError"): False,
    ("Unhex", "failOnError"): False,
    ("XxHash64", "seed"): 42,
}
"""The value of a setting, by (class, field), that the function's plain call gives. Many are what
a setting for older behaviour is by default: with any other the view is not rendered."""
_USUAL_EVERYWHERE: Final[dict[str, Any]] = {"nullOnDivideByZero": True}
"""The same, for all classes with that field."""


_NO_VALUE: Final = object()


class FunctionNames:
    """The functions of a session that are Spark's own, by the class of their expression.

    Takes the lines of `PlanDump.functionNames`. A function that a user put in the place of one
    of Spark's is not known.

    >>> names = FunctionNames("upper\\torg.apache.spark.sql.catalyst.expressions.Upper\\n")
    >>> names.name_of("Upper"), names.name_of("Lower")
    ('upper', None)
    """

    def __init__(self, listing: str) -> None:
        names: dict[str, list[str]] = {}
        for line in listing.splitlines():
            name, full_name = line.split("\t")
            if full_name.startswith(_PACKAGE) and name.replace("_", "a").isalnum():
                names.setdefault(_built(full_name), []).append(name)
        self._known = frozenset(name for found in names.values() for name in found)
        self._names = {
            kind: min(found, key=lambda name: (len(name), name)) for kind, found in names.items()
        }

    def name_of(self, kind: str) -> str | None:
        """Return the function that makes expressions of a class, named without its package."""
        name = _NAMES.get(kind) or self._names.get(kind)
        return name if name in self._known else None

    def all(self) -> frozenset[str]:
        """Return all names."""
        return self._known


def _built(full_name: str) -> str:
    """Return the class that a registered class, or builder of a class, stands for."""
    name = full_name.rsplit(".", 1)[-1]
    for suffix in _BUILDERS:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


class ExpressionText(Protocol):
    """The writer, as the functions for single classes use it."""

    functions: FunctionNames
    ansi: bool
    raw_strings: bool

    def write(self, node: TreeNode) -> str:
        """Return the text of an expression."""

    def many(self, nodes: Iterable[TreeNode]) -> str:
        """Return the texts of several, with commas between."""

    def call(self, node: TreeNode, *, before: str = "") -> str:
        """Return a function's call on all children."""


def evaluation_mode(node: TreeNode) -> str | None:
    """Return ANSI, LEGACY or TRY; None for a class without a mode.

    A flag that says only whether errors are raised is ANSI or LEGACY.
    """
    fields = node.fields
    context = fields.get("evalContext")
    mode = context.get("evalMode") if isinstance(context, dict) else fields.get("evalMode")
    if isinstance(mode, str):
        return mode
    for field in ("failOnError", "ansiEnabled"):
        if (node.name, field) not in _USUAL and isinstance(fields.get(field), bool):
            return "ANSI" if fields[field] else "LEGACY"
    return None


def check_mode(node: TreeNode, *, ansi: bool) -> None:
    """Pass an expression in the mode of its session. Raises `NotRendered` for another."""
    mode = evaluation_mode(node)
    if mode is not None and mode != ("ANSI" if ansi else "LEGACY"):
        raise NotRendered(f"{node.name} in {mode} mode")


def check_settings(node: TreeNode, told: Iterable[str] = ()) -> None:
    """Pass an expression whose settings follow from its call, or are in `told`: the text says
    them otherwise. Raises `NotRendered` naming another."""
    for field in node.fields.get("settings", ()):
        if (
            (field in _MODES and (node.name, field) not in _USUAL)
            or field in _SET_BY_SPARK
            or field in told
        ):
            continue
        value = node.fields.get(field)
        if value == _USUAL.get((node.name, field), _USUAL_EVERYWHERE.get(field, _NO_VALUE)):
            continue
        raise NotRendered(f"{node.name} with {field} {str(value)[:40]}")

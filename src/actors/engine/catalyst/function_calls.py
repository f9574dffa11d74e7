"""Names the functions of Catalyst's expression classes in SQL, and checks the settings that a call
implies.

The text of a call contains only its arguments. A field of the class that is not an argument (a
*setting*) must have the value that Spark gives it when it analyses the text. `check_settings`
rejects any other value, so that a variant of a function is never written as the plain function.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

from actors.engine.catalyst.literals import NotRendered
from actors.engine.catalyst.plan_tree import TreeNode

_PACKAGE: Final = "org.apache.spark.sql.catalyst.expressions."
_BUILDERS: Final = ("ExpressionBuilder", "Builder")
_NAMES: Final = {
    # Classes with several names: the one that has no grammar of its own.
    "BoolAnd": "bool_and",
    "BoolOr": "bool_or",
    "DateAdd": "date_add",
    "StringLocate": "locate",
    "CreateNamedStruct": "named_struct",
    # Classes whose builder has another name.
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
"""Settings that follow from the session's ANSI mode, unless the function is a try_ form."""
_SET_BY_SPARK: Final = frozenset(
    {
        # The time zone of the session, under which the text is also analysed.
        "timeZoneId",
        "zoneId",
        # Offsets in a buffer, which are chosen when a query is executed.
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
"""The value of a setting, by (class, field), in a plain call of the function. Many are defaults of
Spark's legacy settings: with any other value the expression is not rendered."""
_USUAL_EVERYWHERE: Final[dict[str, Any]] = {"nullOnDivideByZero": True}
"""The same for all classes that have the field."""


_NO_VALUE: Final = object()


class FunctionNames:
    """The functions of a session that are Spark's own, by the class of their expression.

    Takes the lines of `PlanDump.functionNames`. A user's function that replaces one of Spark's is
    not among them.

    >>> names = FunctionNames("upper\\torg.apache.spark.sql.catalyst.expressions.Upper\\n")
    >>> names.name_of("Upper"), names.name_of("Lower")
    ('upper', None)
    """

    def __init__(self, listing: str) -> None:
        names: dict[str, list[str]] = {}
        for line in listing.splitlines():
            name, full_name = line.split("\t")
            # The registry also lists operators, which are not names of functions.
            if full_name.startswith(_PACKAGE) and name.replace("_", "a").isalnum():
                names.setdefault(_built(full_name), []).append(name)
        self._known = frozenset(name for found in names.values() for name in found)
        # Of several names always use the same one, whatever the registry's order.
        self._names = {
            kind: min(found, key=lambda name: (len(name), name)) for kind, found in names.items()
        }

    def name_of(self, kind: str) -> str | None:
        """Return the SQL name of the function that makes expressions of a class (given without its
        package); None if it is not known."""
        name = _NAMES.get(kind) or self._names.get(kind)
        return name if name in self._known else None

    def all(self) -> frozenset[str]:
        """Return all names."""
        return self._known


def _built(full_name: str) -> str:
    """Return the class that a registered class makes, directly or as a builder."""
    name = full_name.rsplit(".", 1)[-1]
    for suffix in _BUILDERS:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


class ExpressionText(Protocol):
    """The interface of the writer that functions for single classes use."""

    # The functions of the session.
    functions: FunctionNames
    # Whether the session is in ANSI mode.
    ansi: bool
    # Whether the session reads backslashes in strings literally.
    raw_strings: bool

    def write(self, node: TreeNode) -> str:
        """Return the text of an expression."""

    def many(self, nodes: Iterable[TreeNode]) -> str:
        """Return the texts of several expressions, separated by commas."""

    def call(self, node: TreeNode, *, before: str = "") -> str:
        """Return a call of the node's function with all children as arguments."""


def evaluation_mode(node: TreeNode) -> str | None:
    """Return ANSI, LEGACY or TRY; None for a class without a mode.

    A flag that makes the expression raise errors counts as ANSI, its absence as LEGACY.
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
    """Check that an expression is in the mode of its session. Raises `NotRendered` if it is not."""
    mode = evaluation_mode(node)
    if mode is not None and mode != ("ANSI" if ansi else "LEGACY"):
        raise NotRendered(f"{node.name} in {mode} mode")


def check_settings(node: TreeNode, exempt: Iterable[str] = ()) -> None:
    """Check that the settings of an expression follow from its call, or are in `exempt`, the fields
    that the text contains in another way. Raises `NotRendered` with the name of any other."""
    for field in node.fields.get("settings", ()):
        if (
            (field in _MODES and (node.name, field) not in _USUAL)
            or field in _SET_BY_SPARK
            or field in exempt
        ):
            continue
        value = node.fields.get(field)
        if value == _USUAL.get((node.name, field), _USUAL_EVERYWHERE.get(field, _NO_VALUE)):
            continue
        raise NotRendered(f"{node.name} with {field} {str(value)[:40]}")

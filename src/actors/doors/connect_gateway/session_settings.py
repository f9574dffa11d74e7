"""The settings of a session: which ones a client may change and see, and what each one does.

A setting is obeyed, or it is refused by name. A client that may not run code has few: others name
classes, files and addresses, hold secrets of the service, or change what a text means to Spark's
parser, which has read it by then. One that may has all of Spark's, but for those that the service
needs as they are. What Spark runs in the session obeys all of them; statements of the service obey
those of `_STATEMENTS`, and are refused while another one that could change their rows is changed.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from actors.control.access.access_rules import code_refusal
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.engine.catalyst import permitted_settings
from actors.engine.catalyst.permitted_settings import NAMES, PREFIXES, affects_results
from actors.runtime.errors import AccessDenied, InvalidUsage
from actors.runtime.settings import Settings

POOL: Final = "clients"
"""Fair pool of all clients' work: each view's step has one beside it, so that none waits for it."""
FIRST_SETTINGS: Final = {
    # In another pool a client's work could starve the steps of views.
    "spark.scheduler.pool": POOL,
    # Spark would replace `${…}` in a text before it parses it, by variables of the service too.
    "spark.sql.variable.substitute": "false",
}
"""Settings of each session from its begin, which no client changes."""
FILE_SETTINGS: Final = {
    # A footer's bounds know neither NaN nor that -0.0 is 0.0: a filter on them loses rows of ours.
    "spark.sql.parquet.filterPushdown": "false",
}
"""Settings of a session in which Spark reads parts of shards, which no client changes."""
_FIXED: Final = FIRST_SETTINGS | FILE_SETTINGS
_STATEMENTS: Final = frozenset(
    f"spark.sql.{name}"
    for name in (
        *("ansi.enabled", "binaryOutputStyle", "chunkBase64String.enabled", "crossJoin.enabled"),
        *("collation.allowInMapKeys", "columnNameOfCorruptRecord", "mapKeyDedupPolicy"),
        *("function.concatBinaryAsString", "function.eltOutputAsString", "orderByOrdinal"),
        *("icu.caseMappings.enabled", "jsonGenerator.ignoreNullFields", "session.timeZone"),
    )
)
"""Settings that statements of the service obey: functions and operators mean something else by
them, and names, literals and types do not."""
COMPUTED_CHANGES: Final = frozenset({"EXECUTE", "BEGIN"})
"""First words of texts that may change settings without naming them here."""
WATCHED: Final = frozenset(
    {*_STATEMENTS, *filter(affects_results, NAMES), "spark.sql.storeAssignmentPolicy"}
)
"""Settings that such a text is looked for in afterwards."""
StatementEffect = Literal["obeyed", "refused", "none"]
_PARSED: Final = frozenset(
    {
        "spark.sql.allowNamedFunctionArguments",
        "spark.sql.caseSensitive",
        "spark.sql.operatorPipeSyntaxEnabled",
        "spark.sql.tvf.allowMultipleTableArguments.enabled",
    }
)
"""Settings by which a text names something else, of those that a view may have."""
_CLIENT: Final = """
spark.sql.ansi.enabled
spark.sql.broadcastTimeout
spark.sql.execution.arrow.maxRecordsPerBatch
spark.sql.execution.arrow.pyspark.enabled
spark.sql.execution.arrow.pyspark.fallback.enabled
spark.sql.execution.arrow.pyspark.selfDestruct.enabled
spark.sql.execution.arrow.useLargeVarTypes
spark.sql.execution.pandas.convertToArrowArraySafely
spark.sql.execution.pandas.inferPandasDictAsMap
spark.sql.execution.pandas.structHandlingMode
spark.sql.execution.pyspark.binaryAsBytes
spark.sql.legacy.timeParserPolicy
spark.sql.pyspark.inferNestedDictAsStruct.enabled
spark.sql.pyspark.jvmStacktrace.enabled
spark.sql.pyspark.legacy.inferArrayTypeFromFirstElement.enabled
spark.sql.pyspark.legacy.inferMapTypeFromFirstPair.enabled
spark.sql.repl.eagerEval.enabled
spark.sql.repl.eagerEval.maxNumRows
spark.sql.repl.eagerEval.truncate
"""
"""Settings of sessions alone, and those of families that change what a text names."""
_SEEN: Final = """
spark.api.mode
spark.connect.session.planCompression.defaultAlgorithm
spark.connect.session.planCompression.threshold
spark.sql.ansi.doubleQuotedIdentifiers
spark.sql.caseSensitive
spark.sql.connect.serverStacktrace.enabled
spark.sql.execution.pythonUDF.arrow.enabled
spark.sql.execution.pythonUDTF.arrow.enabled
spark.sql.session.localRelationBatchOfChunksSizeBytes
spark.sql.session.localRelationCacheThreshold
spark.sql.session.localRelationChunkSizeBytes
spark.sql.session.localRelationChunkSizeRows
spark.sql.session.localRelationSizeLimit
spark.sql.variable.substitute
"""
SET_WITHOUT_CODE: Final = NAMES - _PARSED | frozenset(_CLIENT.split())
"""Settings that a client may change."""
SEEN_WITHOUT_CODE: Final = SET_WITHOUT_CODE | frozenset(_SEEN.split())
"""Settings that a client may see: clients ask for many of these by themselves."""


def statement_effect(name: str) -> StatementEffect:
    """Return what a setting of a session is to the service's statements that compute rows: they
    obey it, they are refused while it is changed, or it has no part in their rows.

    >>> statement_effect("spark.sql.ansi.enabled"), statement_effect("spark.sql.caseSensitive")
    ('obeyed', 'refused')
    >>> statement_effect("spark.sql.storeAssignmentPolicy")
    'refused'
    >>> statement_effect("spark.sql.shuffle.partitions"), statement_effect("spark.app.name")
    ('none', 'none')
    """
    if name in _STATEMENTS:
        return "obeyed"
    if affects_results(name):
        return "refused"
    # Of those that nobody has looked at, each may change rows.
    known = name in NAMES or name in SEEN_WITHOUT_CODE or name in _FIXED
    return "none" if known or not name.startswith("spark.sql.") else "refused"


def check_fixed(name: str, value: str | None = None) -> None:
    """Raise `InvalidUsage` if a setting is the service's own, and not to have this value (None: to
    be reset).

    >>> check_fixed("spark.scheduler.pool", "clients")
    >>> check_fixed("spark.sql.variable.substitute", "true")
    Traceback (most recent call last):
        ...
    actors.runtime.errors.InvalidUsage: setting spark.sql.variable.substitute is 'false' in every \
session
    """
    fixed = _FIXED.get(name)
    if fixed is not None and value != fixed:
        raise InvalidUsage(f"setting {name} is {fixed!r} in every session")


def check_fixed_text(name: str, *, resets: bool, assigns: bool) -> None:
    """Raise `InvalidUsage` for a SET or RESET statement that changes a setting as `check_fixed`
    refuses it. `name`: "" for all settings."""
    if resets and not name:
        raise InvalidUsage(
            "RESET of all settings would reset those that the service needs: reset each by its name"
        )
    if resets or assigns:
        check_fixed(name)


def settings_without_code(settings: Settings) -> Mapping[str, str]:
    """Return the settings of a session that may not run code, from its begin."""
    return {
        # What Spark's parser was asked about a text must be what it finds in it here.
        "spark.sql.ansi.doubleQuotedIdentifiers": "false",
        "spark.sql.caseSensitive": "false",
        # Clients upload larger rows as artifacts, which are refused: they stay in the plan.
        "spark.sql.session.localRelationCacheThreshold": str(settings.connect_message_bytes_max),
    }


def check_settings(request: ProtoMessage, role: str, partitions_max: int) -> None:
    """Raise `AccessDenied` if a `ConfigRequest` of a role changes or asks for a setting that it may
    not, and `InvalidUsage` for a value that a view's setting may not have."""
    operation = request.operation
    kind = operation.WhichOneof("op_type")
    if kind in (None, "get_all", "is_modifiable"):
        return  # see `seen_settings`
    asked: Any = getattr(operation, kind)
    paired = kind in ("set", "get_with_default")
    names = [pair.key for pair in asked.pairs] if paired else list(asked.keys)
    changed = kind in ("set", "unset")
    for name in names:
        if name not in (SET_WITHOUT_CODE if changed else SEEN_WITHOUT_CODE):
            raise AccessDenied(code_refusal(role, f"setting {name}"))
    for pair in asked.pairs if kind == "set" else ():
        if "${" in pair.value:
            raise AccessDenied(code_refusal(role, f"setting {pair.key} with ${{…}} in its value"))
        if pair.key in NAMES:
            permitted_settings.check_settings({pair.key: pair.value}, partitions_max)


def seen_settings(request: ProtoMessage, answer: ProtoMessage) -> ProtoMessage:
    """Return Spark's answer to a `ConfigRequest` for all settings, with those alone that the client
    may see."""
    # Spark leaves the prefix out of the names.
    prefix = request.operation.get_all.prefix
    kept = [pair for pair in answer.pairs if prefix + pair.key in SEEN_WITHOUT_CODE]
    made = type(answer)()
    made.CopyFrom(answer)
    del made.pairs[:]
    made.pairs.extend(kept)
    return made


# -- documentation ---------------------------------------------------------------------------------

_IN_STATEMENTS: Final = {
    "obeyed": "obeyed; kept by materialized views",
    "refused": "refused while changed; kept by materialized views",
    "none": "no effect on rows",
}


def settings_table() -> str:
    """Return the settings as a table of the documentation."""
    lines = [
        "| setting | without EXECUTE CODE | queries and DataFrames | statements of Penstock |",
        "|---|---|---|---|",
    ]
    for name, value in sorted(_FIXED.items()):
        lines.append(f"| `{name}` | refused | always `{value}`; others are refused | the same |")
    for name in sorted(NAMES | SET_WITHOUT_CODE):
        may = "may be set" if name in SET_WITHOUT_CODE else "refused"
        lines.append(f"| `{name}` | {may} | obeyed | {_IN_STATEMENTS[statement_effect(name)]} |")
    for prefix in PREFIXES:
        effect = _IN_STATEMENTS[statement_effect(prefix)]
        lines.append(f"| all others of `{prefix}*` | refused | obeyed | {effect} |")
    lines += [
        "| all others of `spark.sql.*` | refused | obeyed | refused while changed, as are views |",
        f"| all others | refused | obeyed | {_IN_STATEMENTS['none']} |",
    ]
    return "\n".join(lines) + "\n"

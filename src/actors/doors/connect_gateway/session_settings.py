"""Spark settings of a session: which ones a client may change and read, and their effects. Pure.

A setting is either obeyed, or rejected with an error that names it. A client that may not run code
can use few settings, because others name classes, files or addresses, contain secrets of the
service, or change the meaning of a text after Spark's parser has analyzed it. A client that may run
code can use all settings of Spark, except those whose values the service requires. Whatever Spark
runs in the session obeys all settings. The service's own statements obey those in `_STATEMENTS`,
and are rejected while any other setting that could affect their rows is changed.
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
"""Spark's fair scheduler pool for the work of all clients. The steps of views run in other pools,
so that client work does not delay them."""
FIRST_SETTINGS: Final = {
    # In another pool, a client's work could starve the steps of views.
    "spark.scheduler.pool": POOL,
    # Spark would replace `${…}` in a text before parsing it, including by the service's variables.
    "spark.sql.variable.substitute": "false",
}
"""Initial settings of every session, which clients cannot change."""
FILE_SETTINGS: Final = {
    # Bounds in Parquet footers ignore NaN and the equality of -0.0 and 0.0, so filters on them
    # could lose rows.
    "spark.sql.parquet.filterPushdown": "false",
}
"""Settings of sessions in which Spark reads parts of shards, which clients cannot change."""
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
"""Settings that the service's statements obey: they change the meaning of functions and operators,
but not of names, literals and types."""
COMPUTED_CHANGES: Final = frozenset({"EXECUTE", "BEGIN"})
"""First words of texts that may change settings that the text does not name."""
WATCHED: Final = frozenset(
    {*_STATEMENTS, *filter(affects_results, NAMES), "spark.sql.storeAssignmentPolicy"}
)
"""Settings to check for changes after a text in `COMPUTED_CHANGES`."""
StatementEffect = Literal["obeyed", "refused", "none"]
_PARSED: Final = frozenset(
    {
        "spark.sql.allowNamedFunctionArguments",
        "spark.sql.caseSensitive",
        "spark.sql.operatorPipeSyntaxEnabled",
        "spark.sql.tvf.allowMultipleTableArguments.enabled",
    }
)
"""Settings, among those that a view may have, that change what the names in a text refer to."""
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
"""Further settings that a client without the right to run code may change."""
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
"""Settings that a client without the right to run code may change."""
SEEN_WITHOUT_CODE: Final = SET_WITHOUT_CODE | frozenset(_SEEN.split())
"""Settings that a client without the right to run code may read. The client libraries read many of
them themselves."""


def statement_effect(name: str) -> StatementEffect:
    """Return how a session's setting affects the service's statements that compute rows: they obey
    it, they are rejected while it is changed, or it does not affect their rows.

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
    # Any unknown setting of Spark SQL may affect rows.
    known = name in NAMES or name in SEEN_WITHOUT_CODE or name in _FIXED
    return "none" if known or not name.startswith("spark.sql.") else "refused"


def check_fixed(name: str, value: str | None = None) -> None:
    """Raise `InvalidUsage` if clients cannot change a setting, and this is not its value. `value`:
    None if the setting should be reset.

    >>> check_fixed("spark.scheduler.pool", "clients")
    >>> check_fixed("spark.sql.variable.substitute", "true")
    Traceback (most recent call last):
        ...
    actors.runtime.errors.InvalidUsage: setting spark.sql.variable.substitute cannot be changed \
from 'false'
    """
    fixed = _FIXED.get(name)
    if fixed is not None and value != fixed:
        raise InvalidUsage(f"setting {name} cannot be changed from {fixed!r}")


def check_fixed_text(name: str, *, resets: bool, assigns: bool) -> None:
    """Raise `InvalidUsage` for a SET or RESET statement of a setting that clients cannot change.
    `name`: "" for all settings."""
    if resets and not name:
        raise InvalidUsage(
            "RESET of all settings is not supported, because the service requires some of them: "
            "reset each setting by name"
        )
    if resets or assigns:
        check_fixed(name)


def settings_without_code(settings: Settings) -> Mapping[str, str]:
    """Return additional initial settings for a session that may not run code."""
    return {
        # The session must parse texts as Spark's parser did when the text was checked.
        "spark.sql.ansi.doubleQuotedIdentifiers": "false",
        "spark.sql.caseSensitive": "false",
        # Clients upload larger local rows as artifacts, which are rejected. This keeps such rows in
        # the plan.
        "spark.sql.session.localRelationCacheThreshold": str(settings.connect_message_bytes_max),
    }


def check_settings(request: ProtoMessage, role: str, partitions_max: int) -> None:
    """Check a `ConfigRequest` of a role without the right to run code. Raises `AccessDenied` if it
    may not change or read a setting, and `InvalidUsage` for an invalid value of a view's
    setting."""
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
    """Filter Spark's response to a `ConfigRequest` for all settings by those that the client may
    read."""
    # Spark omits the requested prefix from the names.
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
    """Return the settings as a table for the documentation."""
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

"""The settings of a session that a client may change and see without the right to run code. Pure.

Others name classes, files and addresses, hold secrets of the service, or change what a text means
to Spark's parser, which has read it by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from actors.access.access_rules import code_refusal
from actors.catalyst import permitted_settings
from actors.catalyst.permitted_settings import NAMES
from actors.connect_gateway.plan_rewriting import ProtoMessage
from actors.errors import AccessDenied
from actors.settings import Settings

POOL_SETTING: Final = "spark.scheduler.pool"
"""Left out wherever a client sets it."""
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
        if not (may_set(name) if changed else name in SEEN_WITHOUT_CODE):
            raise AccessDenied(code_refusal(role, f"setting {name}"))
    for pair in asked.pairs if kind == "set" else ():
        if "${" in pair.value:
            raise AccessDenied(code_refusal(role, f"setting {pair.key} with ${{…}} in its value"))
        if pair.key in NAMES:
            permitted_settings.check_settings({pair.key: pair.value}, partitions_max)


def may_set(name: str) -> bool:
    """Return whether a client may change a setting."""
    return name in SET_WITHOUT_CODE or name == POOL_SETTING


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

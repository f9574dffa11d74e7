"""The settings of a session that a client may change and see without the right to run code. Pure.

Others name classes, files and addresses, hold secrets of the service, or change what a text means
to Spark's parser, which has read it by then.
"""

from __future__ import annotations

from typing import Any, Final

from actors.access.access_rules import code_refusal
from actors.connect_gateway.plan_rewriting import ProtoMessage
from actors.errors import AccessDenied

POOL_SETTING: Final = "spark.scheduler.pool"
"""Left out wherever a client sets it."""
_SET: Final = """
spark.sql.adaptive.autoBroadcastJoinThreshold
spark.sql.adaptive.coalescePartitions.enabled
spark.sql.adaptive.enabled
spark.sql.adaptive.skewJoin.enabled
spark.sql.ansi.enabled
spark.sql.autoBroadcastJoinThreshold
spark.sql.broadcastTimeout
spark.sql.crossJoin.enabled
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
spark.sql.mapKeyDedupPolicy
spark.sql.optimizer.dynamicPartitionPruning.enabled
spark.sql.pyspark.inferNestedDictAsStruct.enabled
spark.sql.pyspark.jvmStacktrace.enabled
spark.sql.pyspark.legacy.inferArrayTypeFromFirstElement.enabled
spark.sql.pyspark.legacy.inferMapTypeFromFirstPair.enabled
spark.sql.repl.eagerEval.enabled
spark.sql.repl.eagerEval.maxNumRows
spark.sql.repl.eagerEval.truncate
spark.sql.session.timeZone
spark.sql.shuffle.partitions
spark.sql.storeAssignmentPolicy
spark.sql.timestampType
"""
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
SET_WITHOUT_CODE: Final = frozenset(_SET.split())
"""Settings that a client may change."""
SEEN_WITHOUT_CODE: Final = SET_WITHOUT_CODE | frozenset(_SEEN.split())
"""Settings that a client may see: clients ask for many of these by themselves."""


def check_settings(request: ProtoMessage, role: str) -> None:
    """Raise `AccessDenied` if a `ConfigRequest` of a role changes or asks for a setting that it may
    not."""
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

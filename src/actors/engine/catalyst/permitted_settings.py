"""The settings of Spark that a view, or a user's session, may change. Pure.

They change what an expression means, or how a query is planned. All other settings belong to the
service: some of them name classes that Spark loads, catalogs and addresses that it opens, or paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from actors.runtime.errors import InvalidUsage

PREFIXES: Final = (
    "spark.sql.ansi.",
    "spark.sql.decimalOperations.",
    "spark.sql.lateralColumnAlias.",
    "spark.sql.legacy.",
    "spark.sql.parser.",
    "spark.sql.session.collation.",
)
"""Settings with these prefixes are permitted, except for those that name a class."""
_MEANING: Final = """
allowNamedFunctionArguments binaryOutputStyle caseSensitive charAsVarchar chunkBase64String.enabled
collation.allowInMapKeys columnNameOfCorruptRecord crossJoin.enabled function.concatBinaryAsString
function.eltOutputAsString groupByAliases groupByOrdinal icu.caseMappings.enabled
jsonGenerator.ignoreNullFields mapKeyDedupPolicy operatorPipeSyntaxEnabled orderByOrdinal
preserveCharVarcharTypeInfo session.timeZone timeType.enabled timestampType
tvf.allowMultipleTableArguments.enabled
"""
"""Settings that change the meaning of a text, without ``spark.sql.``."""
_PLANNING: Final = """
adaptive.advisoryPartitionSizeInBytes adaptive.autoBroadcastJoinThreshold
adaptive.coalescePartitions.enabled adaptive.coalescePartitions.minPartitionSize
adaptive.coalescePartitions.parallelismFirst adaptive.enabled adaptive.localShuffleReader.enabled
adaptive.skewJoin.enabled adaptive.skewJoin.skewedPartitionFactor
adaptive.skewJoin.skewedPartitionThresholdInBytes autoBroadcastJoinThreshold codegen.factoryMode
codegen.wholeStage join.preferSortMergeJoin maxSinglePartitionBytes shuffledHashJoinFactor
subexpressionElimination.enabled window.segmentTree.blockSize window.segmentTree.enabled
"""
_PARTITIONS: Final = frozenset(
    {
        "spark.sql.adaptive.coalescePartitions.initialPartitionNum",
        "spark.sql.leafNodeDefaultParallelism",
        "spark.sql.shuffle.partitions",
    }
)
"""Settings that are numbers of tasks, each of which takes memory of the driver."""
NAMES: Final = _PARTITIONS | {
    f"spark.sql.{name}" for name in (*_MEANING.split(), *_PLANNING.split())
}
_SUBSTITUTED: Final = "${"
"""Start of what Spark substitutes in a setting's value, such as variables of its environment."""


def is_permitted_setting(name: str) -> bool:
    """Return whether a view or a user's session may change a setting.

    >>> is_permitted_setting("spark.sql.ansi.enabled")
    True
    >>> is_permitted_setting("spark.sql.catalog.p"), is_permitted_setting("spark.jars")
    (False, False)
    >>> is_permitted_setting("spark.sql.legacy.someClass")
    False
    """
    # Spark compares names of settings case-sensitively, and so does this function.
    return name in NAMES or (name.startswith(PREFIXES) and "class" not in name.lower())


def affects_results(name: str) -> bool:
    """Return whether a permitted setting changes the meaning of a text rather than only its
    planning.

    >>> affects_results("spark.sql.session.timeZone")
    True
    >>> affects_results("spark.sql.shuffle.partitions")
    False
    """
    planning = name in _PARTITIONS or name.removeprefix("spark.sql.") in _PLANNING.split()
    return is_permitted_setting(name) and not planning


def check_settings(conf: Mapping[str, str], partitions_max: int) -> None:
    """Check the settings of a view or of a user's session.

    Raises:
        InvalidUsage: A setting is not permitted, is a number of partitions above `partitions_max`,
            or has a value in which Spark would substitute something.
    """
    for name, value in conf.items():
        if not is_permitted_setting(name):
            raise InvalidUsage(
                f"setting {name!r} belongs to the service, and views and sessions cannot change"
                f" it; permitted settings: {permitted_settings()}"
            )
        # Whatever `spark.sql.variable.substitute` says: that setting only concerns texts.
        if _SUBSTITUTED in value:
            raise InvalidUsage(
                f"invalid value for setting {name!r}: substitution is not supported, so it must not"
                f" contain {_SUBSTITUTED!r}"
            )
        if name in _PARTITIONS and value.strip().isdecimal() and int(value) > partitions_max:
            raise InvalidUsage(
                f"setting {name!r} has too many partitions: {value.strip()[:20]}"
                f" (engine_shuffle_partitions_max = {partitions_max})"
            )


def permitted_settings() -> str:
    """Return the permitted settings as a readable list.

    >>> permitted_settings()[:40]
    'spark.sql.adaptive.advisoryPartitionSize'
    """
    return ", ".join(sorted([*NAMES, *(f"{prefix}*" for prefix in PREFIXES)]))

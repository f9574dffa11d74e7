"""Spark's settings that a view, or a session of a user, may have. Pure.

They change what an expression means, or how a query is planned. All others are the service's: some
name classes that Spark loads, catalogs and addresses that it opens, or paths.
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
"""Settings of these families are permitted, but for those that name a class."""
_MEANING: Final = """
allowNamedFunctionArguments binaryOutputStyle caseSensitive charAsVarchar chunkBase64String.enabled
collation.allowInMapKeys columnNameOfCorruptRecord crossJoin.enabled function.concatBinaryAsString
function.eltOutputAsString groupByAliases groupByOrdinal icu.caseMappings.enabled
jsonGenerator.ignoreNullFields mapKeyDedupPolicy operatorPipeSyntaxEnabled orderByOrdinal
preserveCharVarcharTypeInfo session.timeZone timeType.enabled timestampType
tvf.allowMultipleTableArguments.enabled
"""
"""Settings by which a text means something else, without ``spark.sql.``."""
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
"""Settings that are numbers of tasks: each takes memory of the driver."""
NAMES: Final = _PARTITIONS | {
    f"spark.sql.{name}" for name in (*_MEANING.split(), *_PLANNING.split())
}
_SUBSTITUTED: Final = "${"
"""Mark of what Spark replaces in a setting's value: variables of its environment, and others."""


def is_permitted_setting(name: str) -> bool:
    """Return whether a view or a user's session may have a setting.

    >>> is_permitted_setting("spark.sql.ansi.enabled")
    True
    >>> is_permitted_setting("spark.sql.catalog.p"), is_permitted_setting("spark.jars")
    (False, False)
    >>> is_permitted_setting("spark.sql.legacy.someClass")
    False
    """
    # Spark compares names of settings with regard to case, and so do we.
    return name in NAMES or (name.startswith(PREFIXES) and "class" not in name.lower())


def affects_results(name: str) -> bool:
    """Return whether a permitted setting changes what a text means, and not how it is planned.

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
        InvalidUsage: for one that is not permitted, for a number of partitions above
            `partitions_max`, and for a value in which Spark would replace something.
    """
    for name, value in conf.items():
        if not is_permitted_setting(name):
            raise InvalidUsage(
                f"setting {name!r} is the service's own, and no view or session may have it: "
                f"permitted are {permitted_settings()}"
            )
        # Whatever `spark.sql.variable.substitute` says: that is of texts.
        if _SUBSTITUTED in value:
            raise InvalidUsage(
                f"setting {name!r}: nothing is replaced in its value, which must not hold "
                f"{_SUBSTITUTED!r}"
            )
        if name in _PARTITIONS and value.strip().isdecimal() and int(value) > partitions_max:
            raise InvalidUsage(
                f"setting {name!r}: {value.strip()[:20]} partitions are too many: at most "
                f"{partitions_max} (engine_shuffle_partitions_max)"
            )


def permitted_settings() -> str:
    """Return the permitted settings, for people.

    >>> permitted_settings()[:40]
    'spark.sql.adaptive.advisoryPartitionSize'
    """
    return ", ".join(sorted([*NAMES, *(f"{prefix}*" for prefix in PREFIXES)]))

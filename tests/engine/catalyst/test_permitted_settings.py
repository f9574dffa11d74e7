"""Spark's settings of views and users' sessions."""

from __future__ import annotations

import pytest

from actors.engine.catalyst.permitted_settings import (
    check_settings,
    is_permitted_setting,
    permitted_settings,
)
from actors.runtime.errors import InvalidUsage


def test_settings_of_meaning_and_planning_are_permitted() -> None:
    conf = {
        "spark.sql.ansi.enabled": "false",
        "spark.sql.session.timeZone": "Europe/Berlin",
        "spark.sql.legacy.sizeOfNull": "true",
        "spark.sql.parser.escapedStringLiterals": "true",
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.shuffle.partitions": "1000",
    }
    check_settings(conf, 1000)
    assert all(map(is_permitted_setting, conf))


@pytest.mark.parametrize(
    "name",
    """
    spark.sql.variable.substitute spark.sql.catalog.p spark.sql.catalog.spark_catalog
    spark.sql.runSQLOnFiles spark.sql.extensions spark.sql.warehouse.dir spark.sql.defaultCatalog
    spark.sql.sources.default spark.jars spark.files spark.hadoop.fs.s3a.access.key
    spark.sql.hive.metastore.jars spark.sql.adaptive.customCostEvaluatorClass
    spark.sql.cache.serializer spark.sql.reflect.allowList spark.sql.udt.allowCreatingUDTFromString
    spark.sql.streaming.checkpointLocation spark.sql.queryExecutionListeners spark.sql.ansi
    SPARK.SQL.ANSI.ENABLED spark.sql.session.collation mine spark.sql.legacy.anyClass
    """.split(),  # noqa: SIM905
)
def test_all_others_are_refused_by_name(name: str) -> None:
    assert not is_permitted_setting(name)
    pattern = r"belongs to the service.*spark\.sql\.ansi\.\*"
    with pytest.raises(InvalidUsage, match=pattern) as error:
        check_settings({"spark.sql.ansi.enabled": "true", name: "true"}, 1000)
    assert repr(name) in str(error.value)


def test_nothing_is_replaced_in_a_value() -> None:
    # Spark does so when it reads a setting, whatever `spark.sql.variable.substitute` says.
    with pytest.raises(InvalidUsage, match="substitution is not supported"):
        check_settings({"spark.sql.session.timeZone": "${env:HOME}"}, 1000)


def test_partitions_are_bounded() -> None:
    for name in ("spark.sql.shuffle.partitions", "spark.sql.leafNodeDefaultParallelism"):
        with pytest.raises(InvalidUsage, match="= 7"):
            check_settings({name: " 8 "}, 7)
        check_settings({name: "7"}, 7)


def test_people_are_told_all_of_them() -> None:
    told = permitted_settings()
    assert "spark.sql.session.timeZone" in told
    assert "spark.sql.legacy.*" in told

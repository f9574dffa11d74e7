"""What everybody may use of Spark SQL, against what the installed Spark has."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.engine.catalyst.permitted_functions import (
    FUNCTION_NAMES,
    FUNCTIONS,
    NODES,
    REFUSED_FUNCTIONS,
    REFUSED_NAMES,
    REFUSED_OPTIONS,
    REFUSED_TABLE_FUNCTIONS,
    TABLE_FUNCTION_NAMES,
    TABLE_FUNCTIONS,
    is_permitted_function,
    is_permitted_table_function,
)

CATALYST = "org.apache.spark.sql.catalyst."
SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4}
SIZES |= {15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
"""Bytes of each kind of constant in a class file, behind its tag; texts (1) say their own."""
INTERNAL = {
    f"{CATALYST}expressions.{name}"
    for name in """
    ArrayBinarySearch Bucket CastTimestampNTZToLong CreateStruct Days DistributedSequenceID EWM
    Expression ExpressionInfo Generator GeneratorOuter Hours LambdaFunction Months
    NamedArgumentExpression NullIndex TimestampAdd TimestampDiff UnwrapUDT Years
    aggregate.BloomFilterAggregate aggregate.CollectTopK aggregate.PandasCovar
    aggregate.PandasKurtosis aggregate.PandasMode aggregate.PandasProduct aggregate.PandasSkewness
    aggregate.PandasStddev aggregate.PandasVariance aggregate.Product
    DirectShufflePartitionID InSubquery
    """.split()  # noqa: SIM905
}
"""Classes that the registries name and that are no functions of SQL: internal ones, which data
frames ask for, and the registries' own means."""
MEANS = {
    f"{CATALYST}plans.logical.{name}"
    for name in ("FunctionBuilderBase", "FunctionSignature", "Generate", "LogicalPlan")
}
MEANS.add(f"{CATALYST}plans.logical.OneRowRelation")


def constants(name: str) -> Iterator[tuple[int, str]]:
    """The classes (7) and texts (8) that a class of the installed Spark names."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    (jar,) = (Path(spec.origin).parent / "jars").glob("spark-catalyst_*.jar")
    with zipfile.ZipFile(jar) as archive:
        data = archive.read(f"{CATALYST}{name}".replace(".", "/") + ".class")
    (count,) = struct.unpack_from(">H", data, 8)
    texts, named, at, number = {}, [], 10, 1
    while number < count:
        tag = data[at]
        if tag == 1:
            (size,) = struct.unpack_from(">H", data, at + 1)
            texts[number] = data[at + 3 : at + 3 + size].decode(errors="replace")
            at += 3 + size
        else:
            if tag in (7, 8):
                named.append((tag, struct.unpack_from(">H", data, at + 1)[0]))
            at += 1 + SIZES[tag]
        number += 2 if tag in (5, 6) else 1
    return ((tag, texts[place]) for tag, place in named)


def registered(name: str) -> set[str]:
    """The classes that a registry names, but for its means."""
    packages = (f"{CATALYST}expressions.", f"{CATALYST}plans.logical.")
    found = {text.replace("/", ".").rstrip("$") for tag, text in constants(name) if tag == 7}
    return {each for each in found if each.startswith(packages)} - INTERNAL - MEANS


def test_each_function_of_the_installed_spark_is_decided_on() -> None:
    """A release with a function that is in none of the lists fails here: look at what it does, and
    add it to one of them."""
    found = registered("analysis.FunctionRegistry$")
    assert len(found) > 400
    assert found - FUNCTIONS.keys() - REFUSED_FUNCTIONS.keys() == set()
    found = registered("analysis.TableFunctionRegistry$")
    assert len(found) > 10
    assert found - TABLE_FUNCTIONS.keys() - REFUSED_TABLE_FUNCTIONS.keys() == set()


@pytest.mark.parametrize("name", ["json.JSONOptions$", "csv.CSVOptions$", "xml.XmlOptions$"])
def test_each_option_that_names_a_file_is_refused(name: str) -> None:
    texts = {text.lower() for tag, text in constants(name) if tag == 8 and text.isalnum()}
    assert "mode" in texts
    words = ("path", "file", "xsd", "url", "uri", "dir", "class", "location")
    assert {each for each in texts if any(word in each for word in words)} <= REFUSED_OPTIONS


def test_no_function_is_in_two_lists() -> None:
    assert not FUNCTIONS.keys() & REFUSED_FUNCTIONS.keys()
    assert not (FUNCTION_NAMES | TABLE_FUNCTION_NAMES) & REFUSED_NAMES
    refused = """reflect try_reflect java_method input_file_name input_file_block_start from_avro
        to_protobuf xpath_string python_worker_logs"""
    assert set(refused.split()) <= REFUSED_NAMES
    for name in REFUSED_NAMES:
        assert not is_permitted_function(name)
        assert not is_permitted_table_function(name)
    assert is_permitted_function("Date_Add")
    assert is_permitted_table_function("EXPLODE")


def test_nodes_that_run_other_code_or_read_elsewhere_are_none_of_those_permitted() -> None:
    refused = """
        expressions.ScalaUDF expressions.PythonUDF expressions.PythonUDAF
        expressions.UserDefinedGenerator expressions.CallMethodViaReflection
        expressions.InputFileName expressions.ApplyFunctionExpression
        expressions.VariableReference expressions.aggregate.V2Aggregator
        expressions.objects.StaticInvoke expressions.objects.NewInstance
        plans.logical.ScriptTransformation plans.logical.InsertIntoDir
        plans.logical.PythonWorkerLogs analysis.RelationTimeTravel
        plans.logical.UnresolvedDataSource analysis.UnresolvedExecuteImmediate
    """
    assert not NODES & {CATALYST + name for name in refused.split()}
    assert all(name.startswith(CATALYST) for name in NODES)
    assert not any(word in name for name in NODES for word in ("UDF", "Hive", "Stream"))

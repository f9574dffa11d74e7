"""Expressions written from small trees: literals, chains, modes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from actors.engine.catalyst.expressions import ExpressionWriter
from actors.engine.catalyst.filter_safety import is_surely_safe
from actors.engine.catalyst.function_calls import FunctionNames
from actors.engine.catalyst.literals import NotRendered, literal_text, type_text
from actors.engine.catalyst.plan_tree import TreeNode

PACKAGE = "org.apache.spark.sql.catalyst.expressions."
NAMES = FunctionNames(
    "".join(
        f"{name}\t{PACKAGE}{kind}\n"
        for name, kind in (
            ("upper", "Upper"),
            ("ucase", "Upper"),
            ("lpad", "LPadExpressionBuilder"),
            ("nvl", "Nvl"),
            ("hash", "Murmur3Hash"),
            ("if", "If"),
            ("rand", "Rand"),
            ("transform", "ArrayTransform"),
        )
    )
    + "reverse\tsomebody.elses.Reverse\n"
)


def node(name: str, *children: TreeNode, **fields: Any) -> TreeNode:
    return TreeNode(PACKAGE + name, fields, list(children))


def column(identity: int, kind: Any = "integer") -> TreeNode:
    return node("AttributeReference", exprId=identity, dataType=kind)


def literal(value: str | None, kind: Any) -> TreeNode:
    return node("Literal", value=value, dataType=kind)


def writer(**settings: bool) -> ExpressionWriter:
    return ExpressionWriter(NAMES, lambda identity: f"c{identity}", **settings)


def write(tree: TreeNode, **settings: bool) -> str:
    return writer(**settings).write(tree)


LITERALS = (
    ("it's \\ \n", "string", "'it\\'s \\\\ \\n'"),
    ("${spark.master}", "string", "'\\u0024{spark.master}'"),
    (None, "string", "CAST(NULL AS string)"),
    (None, "void", "NULL"),
    ("-5", "integer", "(-5)"),
    ("-128", "byte", "(-128Y)"),
    ("7", "long", "7L"),
    ("true", "boolean", "true"),
    ("1.50", "decimal(3,2)", "1.50BD"),
    ("0.05", "decimal(2,2)", "0.05BD"),
    ("1.50", "decimal(10,2)", "CAST('1.50' AS decimal(10,2))"),
    ("-0.0", "double", "(-0.0D)"),
    ("NaN", "double", "CAST('NaN' AS double)"),
    ("1.5", "float", "1.5F"),
    ("00FF", "binary", "X'00FF'"),
    ("-1", "date", "DATE'1969-12-31'"),
    ("9999999", "date", "date_from_unix_date(9999999)"),
    ("1500000", "timestamp", "TIMESTAMP'1970-01-01 00:00:01.500000Z'"),
    ("1500000", "timestamp_ntz", "TIMESTAMP_NTZ'1970-01-01 00:00:01.500000'"),
    ("14", "interval year to month", "INTERVAL '1-2' YEAR TO MONTH"),
    ("-14", "interval month", "INTERVAL '-14' MONTH"),
    ("93784500000", "interval day to second", "INTERVAL '1 02:03:04.500000' DAY TO SECOND"),
    ("-90000000", "interval minute to second", "INTERVAL '-1:30.000000' MINUTE TO SECOND"),
    ("1 2 -3000001", "interval", "make_interval(0, (1), 0, (2), 0, 0, (-3.000001BD))"),
)


@pytest.mark.parametrize(("value", "kind", "text"), LITERALS)
def test_literals(value: str | None, kind: str, text: str) -> None:
    assert literal_text(literal(value, kind)) == text


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("[1]", {"type": "array", "elementType": "integer", "containsNull": False}),
        ("x", "variant"),
        (str(-(2**63)), "interval day to second"),
        ("13", "interval year"),
        ("999999999999999999", "timestamp_ntz"),
    ],
)
def test_values_without_a_literal(value: str, kind: Any) -> None:
    with pytest.raises(NotRendered):
        literal_text(literal(value, kind))


def test_backslashes_of_raw_strings() -> None:
    assert literal_text(literal("a\\b", "string"), raw=True) == "CAST(X'615C62' AS string)"
    assert literal_text(literal("ab", "string"), raw=True) == "'ab'"


def test_types() -> None:
    struct = {
        "type": "struct",
        "fields": [
            {"name": "a`b", "type": "long", "nullable": False},
            {"name": "c", "type": "decimal(5,2)", "nullable": True},
        ],
    }
    assert type_text(struct) == "struct<`a``b`: bigint NOT NULL, `c`: decimal(5,2)>"
    with pytest.raises(NotRendered, match="the type geometry"):
        type_text("geometry(4326)")


def test_left_chains_are_flat() -> None:
    tree = column(0)
    for at in range(1, 2_000):
        tree = node("Add" if at % 2 else "Subtract", tree, column(at), evalMode="ANSI")
    text = write(tree)
    assert text.startswith("(c0 + c1 - c2 + c3")
    assert text.count("(") == 1
    assert write(node("Subtract", column(1), node("Add", column(2), column(3)))) == (
        "(c1 - (c2 + c3))"
    )


@pytest.mark.parametrize("left", [True, False])
def test_deep_logic_is_flat_and_in_order(left: bool) -> None:
    tree = column(0)
    for at in range(1, 2_000):
        tree = node("Or", tree, column(at)) if left else node("Or", column(at), tree)
    order = range(2_000) if left else reversed(range(2_000))
    assert write(tree) == "(" + " OR ".join(f"c{at}" for at in order) + ")"


def test_shallow_logic_keeps_its_shape() -> None:
    tree = node("And", column(1), node("And", column(2), node("Or", column(3), column(4))))
    assert write(tree) == "(c1 AND (c2 AND (c3 OR c4)))"


def test_deep_calls_are_refused() -> None:
    tree = column(0)
    for _ in range(500):
        tree = node("Upper", tree)
    with pytest.raises(NotRendered, match="nested deeper"):
        write(tree)


def test_names_follow_from_classes_and_builders() -> None:
    assert write(node("Upper", column(1))) == "ucase(c1)"
    assert write(node("StringLPad", column(1), column(2))) == "lpad(c1, c2)"
    with pytest.raises(NotRendered, match="Reverse"):
        write(node("Reverse", column(1)))


def test_modes() -> None:
    assert write(node("Add", column(1), column(2), evalMode="TRY")) == "try_add(c1, c2)"
    legacy = node("Add", column(1), column(2), evalMode="LEGACY")
    assert write(legacy, ansi=False) == "(c1 + c2)"
    with pytest.raises(NotRendered, match="Add in LEGACY mode"):
        write(legacy)
    cast = node("Cast", column(1), dataType="long", evalMode="TRY")
    assert write(cast) == "TRY_CAST(c1 AS bigint)"


def test_settings_that_a_call_does_not_say() -> None:
    assert write(node("Murmur3Hash", column(1), seed=42, settings=["seed"])) == "hash(c1)"
    with pytest.raises(NotRendered, match="Murmur3Hash with seed 7"):
        write(node("Murmur3Hash", column(1), seed=7, settings=["seed"]))


def test_replaceable_functions() -> None:
    fresh = node("Nvl", column(1), column(2), left=0, right=1, stale=False)
    assert write(fresh) == "nvl(c1, c2)"
    stale = node("Nvl", node("If", column(1), column(2), column(3)), replacement=0, stale=True)
    assert write(stale) == "if(c1, c2, c3)"


def common(identity: int) -> dict[str, Any]:
    return {"product-class": "CommonExpressionId", "id": identity, "canonicalized": False}


def test_a_stale_between_is_one_again() -> None:
    reference = node("CommonExpressionRef", id=common(1))
    body = node(
        "And",
        node("GreaterThanOrEqual", reference, literal("1", "integer")),
        node("LessThanOrEqual", reference, column(3)),
    )
    made = node("With", body, node("CommonExpressionDef", column(9), id=common(1)))
    assert write(node("Between", made, stale=True)) == "(c9 BETWEEN 1 AND c3)"
    assert write(made) == "((c9 >= 1) AND (c9 <= c3))"


def test_lambdas() -> None:
    variable = node("NamedLambdaVariable", exprId=5)
    function = node("LambdaFunction", node("Add", variable, column(2)), variable)
    assert write(node("ArrayTransform", column(1), function)) == (
        "transform(c1, lambda_5 -> (lambda_5 + c2))"
    )


def test_fields_by_name() -> None:
    fields = [{"name": name, "type": "long", "nullable": True} for name in ("a", "b c", "B C")]
    struct = column(1, {"type": "struct", "fields": fields})
    assert write(node("GetStructField", struct, ordinal=0)) == "(c1).`a`"
    with pytest.raises(NotRendered, match="which occurs twice"):
        write(node("GetStructField", struct, ordinal=1))


def test_subqueries_that_are_columns() -> None:
    tree = node("Add", column(1), node("ScalarSubquery", exprId=8))
    with pytest.raises(NotRendered, match="a scalar subquery here"):
        write(tree)
    made = writer()
    made.subqueries[8] = "s1"
    assert made.write(tree) == "(c1 + s1)"


@pytest.mark.parametrize("name", ["PythonUDF", "ScalaUDF", "OuterReference", "Unheard"])
def test_what_is_refused(name: str) -> None:
    with pytest.raises(NotRendered):
        write(node(name, column(1)))


def test_aggregates() -> None:
    function = node("First", column(1), ignoreNulls=True)
    call = node(
        "AggregateExpression",
        function,
        column(2, "boolean"),
        aggregateFunction=0,
        filter=1,
        mode="Complete",
        isDistinct=False,
    )
    assert write(call) == "first(c1, true) FILTER (WHERE c2)"
    order = node("SortOrder", column(1), direction="Descending", nullOrdering="NullsFirst")
    assert write(order) == "c1 DESC NULLS FIRST"


A, B, S = column(1), column(2), column(3, "string")


@pytest.mark.parametrize(
    "tree",
    [
        node("EqualTo", A, B),
        node("And", node("IsNull", S), node("Not", node("LessThan", A, literal("1", "integer")))),
        node("In", S, literal("a", "string")),
        node("Like", S, literal("a%", "string"), escapeChar="\\"),
        node("Cast", A, dataType="long"),
        node("Cast", A, dataType="decimal(12,2)"),
        node("Between", A, B, literal(None, "void"), stale=False),
        node(
            "EqualTo",
            node("Upper", S, type="string"),
            node("Left", S, A, stale=False, type="string"),
        ),
    ],
)
def test_surely_safe(tree: TreeNode) -> None:
    assert is_surely_safe(tree)


@pytest.mark.parametrize(
    "tree",
    [
        node("GreaterThan", node("IntegralDivide", A, B), A),
        node("EqualTo", A, S),
        node("Cast", S, dataType="integer"),
        node("Cast", A, dataType="decimal(11,2)"),
        node("Cast", column(4, "decimal(4,3)"), dataType="decimal(4,2)"),
        node("Cast", column(4, "long"), dataType="integer"),
        node("Like", S, S, escapeChar="\\"),
        node("Like", S, literal("\\a", "string"), escapeChar="\\"),
        node("Between", A, S, S, stale=False),
        node("IsNull", node("RaiseError", S)),
        node("IsNull", node("Rand", volatile=True)),
        node("IsNull", node("ScalaUDF", A)),
    ],
)
def test_perhaps_unsafe(tree: TreeNode) -> None:
    assert not is_surely_safe(tree)

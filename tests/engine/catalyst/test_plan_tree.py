"""Catalyst trees of JSON: their shape, their fields, and the limits of what is read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.engine.catalyst.plan_tree import (
    PlanTreeRejected,
    TreeNode,
    attribute_ids,
    parse_tree,
    simple_name,
    walk,
)

PACKAGE = "org.apache.spark.sql.catalyst."


def item(kind: str, count: int = 0, /, **fields: Any) -> dict[str, Any]:
    return {"class": f"{PACKAGE}expressions.{kind}", "num-children": count, **fields}


def parsed(*items: dict[str, Any], nodes_max: int = 10_000, depth_max: int = 5_000) -> TreeNode:
    return parse_tree(msgspec.json.encode(items), nodes_max=nodes_max, depth_max=depth_max)


def attribute(identity: int) -> dict[str, Any]:
    return item("AttributeReference", name="a", dataType="integer", exprId=identity)


def test_children_stand_behind_their_node() -> None:
    tree = parsed(
        item("Add", 2, left=0, right=1), item("Abs", 1, child=0), attribute(1), attribute(2)
    )
    assert [node.name for node in walk(tree)] == ["Add", "Abs"] + ["AttributeReference"] * 2
    right = tree.kid("right")
    assert right is not None
    assert right.fields["exprId"] == 2
    assert attribute_ids(tree) == {1, 2}


def test_fields_hold_trees_objects_and_products() -> None:
    tree = parsed(
        item(
            "Project",
            1,
            child=0,
            projectList=[[attribute(7)], [attribute(8)]],
            joinType={"object": f"{PACKAGE}plans.LeftOuter$"},
            identifier={"product-class": f"{PACKAGE}AliasIdentifier", "name": "t", "qualifier": []},
            dataType={"type": "array", "elementType": "long", "containsNull": True},
        ),
        item("OneRowRelation"),
    )
    assert [node.fields["exprId"] for node in tree.kids("projectList")] == [7, 8]
    assert tree.fields["joinType"] == "LeftOuter"
    assert tree.fields["identifier"] == {
        "product-class": "AliasIdentifier",
        "name": "t",
        "qualifier": [],
    }
    assert tree.fields["dataType"]["elementType"] == "long"


def test_a_number_is_a_child_or_a_setting() -> None:
    tree = parsed(item("Hash", 1, children=[0], seed=0, settings=["seed"]), attribute(1))
    assert [node.name for node in tree.kids("children")] == ["AttributeReference"]
    assert tree.kid("seed") is None
    assert tree.kid("absent") is None


def test_a_list_of_other_things_is_no_list_of_nodes() -> None:
    tree = parsed(item("Project", names=["a"]))
    with pytest.raises(PlanTreeRejected, match=r"Project\.names is not a list of nodes"):
        tree.kids("names")


@pytest.mark.parametrize("left", [True, False])
def test_long_chains_are_no_recursion(left: bool) -> None:
    links = 4_000
    items = [item("And", 2, left=0, right=1) for _ in range(links)]
    if left:
        items += [attribute(at) for at in range(links + 1)]
    else:
        items = [each for link in items for each in (link, attribute(1))] + [attribute(2)]
    tree = parsed(*items)
    assert sum(node.name == "And" for node in walk(tree)) == links
    with pytest.raises(PlanTreeRejected, match="nested deeper than 3000"):
        parsed(*items, depth_max=3_000)


def test_trees_within_fields_count() -> None:
    items = (item("Project", projectList=[[attribute(1)], [attribute(2)]]),)
    assert parsed(*items, nodes_max=3).name == "Project"
    with pytest.raises(PlanTreeRejected, match="more than 2 nodes"):
        parsed(*items, nodes_max=2)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"[", "not JSON"),
        (b"{}", "not a list of nodes"),
        (b"[]", "not a list of nodes"),
        (b'[{"class": "a.B", "num-children": 1}]', "ends within its tree"),
        (
            b'[{"class": "a.B", "num-children": 0}, {"class": "a.B", "num-children": 0}]',
            "after its tree",
        ),
    ],
)
def test_what_is_no_tree(encoded: bytes, reason: str) -> None:
    with pytest.raises(PlanTreeRejected, match=reason):
        parse_tree(encoded, nodes_max=10, depth_max=10)


def test_names_of_classes() -> None:
    assert simple_name(f"{PACKAGE}plans.Inner$") == "Inner"
    assert simple_name("a.Outer$Nested") == "Nested"

"""Accessors for parts of Catalyst's trees."""

from __future__ import annotations

from actors.catalyst.plan_tree import TreeNode
from actors.catalyst.spark_types import type_text


def conjuncts_of(node: TreeNode) -> list[TreeNode]:
    """Return the operands of a conjunction, left to right."""
    found: list[TreeNode] = []
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each.name == "And":
            waiting += reversed(each.children)
        else:
            found.append(each)
    return found


def without_aliases(node: TreeNode) -> TreeNode:
    """Return the expression below aliases."""
    while node.name == "Alias":
        node = node.children[0]
    return node


def type_of(node: TreeNode) -> str:
    """Return an expression's Spark type."""
    fields = node.fields
    return type_text(fields["dataType"] if "type" not in fields else fields["type"])


def is_nullable(node: TreeNode) -> bool:
    """Return whether an expression may be NULL."""
    if node.name == "Literal":
        return node.fields["value"] is None
    found = node.fields.get("null")
    return bool(node.fields.get("nullable", True) if found is None else found)


def attribute_in_place_of(node: TreeNode, number: int) -> TreeNode:
    """Return an attribute with this number and an expression's type."""
    kind = node.fields["dataType" if "type" not in node.fields else "type"]
    fields = {"exprId": number, "name": "", "dataType": kind, "nullable": True}
    return TreeNode("AttributeReference", fields)

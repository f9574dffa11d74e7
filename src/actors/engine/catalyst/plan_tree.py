"""Catalyst trees as Python objects: a parser of the JSON that `PlanDump.java` writes, and
accessors.

A dump is a flat list of nodes, each before its children. It contains types as Spark's JSON;
`type_text` gives the text by which the service names a type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

# -- types -----------------------------------------------------------------------------------------


_NAMES: Final = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}


def type_text(kind: Any) -> str:
    """Return a type in the form of Spark's `simpleString`.

    >>> type_text({"type": "array", "elementType": "long", "containsNull": True})
    'array<bigint>'
    """
    if isinstance(kind, str):
        return _NAMES.get(kind, kind)
    match kind.get("type"):
        case "array":
            return f"array<{type_text(kind['elementType'])}>"
        case "map":
            return f"map<{type_text(kind['keyType'])},{type_text(kind['valueType'])}>"
        case "struct":
            fields = (f"{each['name']}:{type_text(each['type'])}" for each in kind["fields"])
            return f"struct<{','.join(fields)}>"
        case other:
            return str(other)


# -- trees -----------------------------------------------------------------------------------------

_CHILDREN: Final = "num-children"
_PRODUCT: Final = "product-class"
_NO_FIELDS: Final = ("class", _CHILDREN)


class PlanTreeRejected(Exception):
    """The dump is too large or too deep, or is not a tree; the message says which."""


class TreeNode:
    """A node of a Catalyst tree: a plan or an expression.

    `name` is the class without its package, `full_name` with it. `fields` holds the arguments of
    the case class by name: a node among the children as its index there, any other tree as a
    `TreeNode`, an expression id as an integer, a type as Spark's JSON. `PlanDump.java` adds `type`,
    `null`, `volatile` and `settings`: the names of the fields that hold no node and are not empty.
    """

    __slots__ = ("children", "fields", "full_name", "name")

    def __init__(
        self, full_name: str, fields: dict[str, Any], children: list[TreeNode] | None = None
    ) -> None:
        self.full_name = full_name
        self.name = simple_name(full_name)
        self.fields = fields
        self.children: list[TreeNode] = [] if children is None else children

    def kid(self, field: str) -> TreeNode | None:
        """Return the node that a field holds or points to; None if there is none."""
        if field in self.fields.get("settings", ()):
            return None
        return self._node(self.fields.get(field))

    def kids(self, field: str) -> list[TreeNode]:
        """Return the nodes that a field lists. Raises `PlanTreeRejected` for anything else."""
        found = [self._node(value) for value in self.fields.get(field) or ()]
        nodes = [node for node in found if node is not None]
        if len(nodes) < len(found):
            raise PlanTreeRejected(f"{self.name}.{field} is not a list of nodes")
        return nodes

    def _node(self, value: object) -> TreeNode | None:
        if isinstance(value, TreeNode):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return self.children[value] if 0 <= value < len(self.children) else None
        return None

    def replaced(self, children: list[TreeNode]) -> TreeNode:
        """Return the same node with other children."""
        made = TreeNode.__new__(TreeNode)
        made.full_name, made.name, made.fields = self.full_name, self.name, self.fields
        made.children = children
        return made

    def __repr__(self) -> str:
        return f"TreeNode({self.name}, {len(self.children)} children)"


def simple_name(full_name: str) -> str:
    """Return the name of a class or a Scala object without its package and enclosing class.

    >>> simple_name("org.apache.spark.sql.catalyst.plans.Inner$")
    'Inner'
    >>> simple_name("org.apache.spark.sql.catalyst.expressions.Add")
    'Add'
    """
    return full_name.rsplit(".", 1)[-1].rstrip("$").rsplit("$", 1)[-1]


def parse_tree(encoded: bytes | str, *, nodes_max: int, depth_max: int) -> TreeNode:
    """Return the tree of a dump.

    Raises `PlanTreeRejected` if it has more than `nodes_max` nodes (including those of trees within
    fields), nests deeper than `depth_max`, or is not a dump.
    """
    try:
        decoded = msgspec.json.decode(encoded)
    except msgspec.DecodeError as error:
        raise PlanTreeRejected(f"the dump is not JSON: {error}") from None
    if not _is_tree(decoded):
        raise PlanTreeRejected("the dump is not a list of nodes")
    return _TreeParser(nodes_max, depth_max).parse(decoded, 0)


class _TreeParser:
    def __init__(self, nodes_max: int, depth_max: int) -> None:
        # Number of nodes that may still be read.
        self._left = self._nodes_max = nodes_max
        self._depth_max = depth_max

    def parse(self, items: list[dict[str, Any]], depth: int) -> TreeNode:
        # Checked before any nodes of a dump that is too large are made.
        self._left -= len(items)
        if self._left < 0:
            raise PlanTreeRejected(f"the plan has more than {self._nodes_max} nodes")
        root: TreeNode | None = None
        # Nodes that still lack children, with the number of these and the depth. The stack is
        # explicit, so that a chain of a thousand ANDs causes no recursion.
        open_nodes: list[tuple[TreeNode, int, int]] = []
        for item in items:
            parent = None
            at = depth
            if open_nodes:
                parent, lacking, at = open_nodes.pop()
                if lacking > 1:
                    open_nodes.append((parent, lacking - 1, at))
            node = TreeNode(item["class"], self._fields(item, at))
            if parent is not None:
                parent.children.append(node)
            elif root is None:
                root = node
            else:
                raise PlanTreeRejected("the dump has nodes after its tree")
            if item[_CHILDREN]:
                open_nodes.append((node, item[_CHILDREN], at + 1))
        if root is None or open_nodes:
            raise PlanTreeRejected("the dump ends within its tree")
        return root

    def _fields(self, item: dict[str, Any], depth: int) -> dict[str, Any]:
        if depth > self._depth_max:
            raise PlanTreeRejected(f"the plan is nested deeper than {self._depth_max}")
        return {
            key: self._value(value, depth) if type(value) in (list, dict) else value
            for key, value in item.items()
            if key not in _NO_FIELDS
        }

    def _value(self, value: Any, depth: int) -> Any:
        if type(value) is list:
            if _is_tree(value):
                return self.parse(value, depth + 1)
            return [self._value(each, depth) for each in value]
        if type(value) is not dict:
            return value
        if "object" in value:
            return simple_name(value["object"])
        if _PRODUCT in value:
            made = {key: self._value(each, depth) for key, each in value.items()}
            made[_PRODUCT] = simple_name(value[_PRODUCT])
            return made
        return value


def _is_tree(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and _CHILDREN in item and "class" in item for item in value)
    )


def walk(node: TreeNode) -> Iterator[TreeNode]:
    """Yield a node and all nodes below it, parents first, but not the trees within fields."""
    waiting = [node]
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(reversed(found.children))


def attribute_ids(node: TreeNode) -> frozenset[int]:
    """Return the ids of the columns that an expression reads."""
    return frozenset(
        found.fields["exprId"] for found in walk(node) if found.name == "AttributeReference"
    )


# -- parts of trees --------------------------------------------------------------------------------


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
    """Return the expression below its aliases."""
    while node.name == "Alias":
        node = node.children[0]
    return node


def type_of(node: TreeNode) -> str:
    """Return the Spark type of an expression."""
    fields = node.fields
    return type_text(fields["dataType"] if "type" not in fields else fields["type"])


def is_nullable(node: TreeNode) -> bool:
    """Return whether an expression may be NULL."""
    if node.name == "Literal":
        return node.fields["value"] is None
    found = node.fields.get("null")
    return bool(node.fields.get("nullable", True) if found is None else found)


def attribute_in_place_of(node: TreeNode, number: int) -> TreeNode:
    """Return an attribute with this number, of the type of an expression."""
    kind = node.fields["dataType" if "type" not in node.fields else "type"]
    fields = {"exprId": number, "name": "", "dataType": kind, "nullable": True}
    return TreeNode("AttributeReference", fields)

"""Rejects expressions over CHAR(n) columns, since Spark pads the values compared with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.model.plan.relational import (
    AggregationNode,
    DistinctNode,
    FilterNode,
    GroupKey,
    JoinNode,
    NamedExpression,
    OuterJoin,
    Plan,
    ProjectNode,
    ScanNode,
    SemiJoin,
)
from actors.model.plan.relational_walk import nodes
from actors.model.plan.schema import TableSchema
from actors.testing.parsed.trees import UnsupportedConstruct, reads


def check_char_columns(root: Plan, schemas: Sequence[TableSchema]) -> None:
    """Raise `UnsupportedConstruct` if an expression reads a CHAR(n) column of an input (by number).

    Spark pads the values that the analysed query compares with such a column, but a step's query is
    over plain strings. Rows, keys and arguments that are the column itself are exempt: all its
    values are padded.
    """
    chars: set[str] = set()
    for node in nodes(root):
        read: frozenset[str] = frozenset()
        match node:
            case ScanNode():
                types = {
                    column.name: column.type.lower() for column in schemas[node.input_index].columns
                }
                chars |= {id_ for id_, name in node.columns if types[name].startswith("char(")}
            case FilterNode():
                read = reads(node.predicate)
            case JoinNode() | OuterJoin() | SemiJoin():
                read = _union(node.residual)
                read |= _union(side for each in node.equal for side in (each.left, each.right))
            case ProjectNode() | DistinctNode():
                read = _read_and_named(chars, node.columns)
            case AggregationNode():
                arguments = [call.argument for call in node.calls if call.argument not in chars]
                read = _read_and_named(chars, node.keys) | _union(arguments)
        if not chars.isdisjoint(read):
            raise UnsupportedConstruct(
                "an expression over a CHAR column, which Spark pads for comparisons"
            )


def _read_and_named(chars: set[str], made: Sequence[NamedExpression | GroupKey]) -> frozenset[str]:
    """Return the columns that expressions read. An expression that is itself a column of `chars` is
    exempt, and its name is added to `chars`."""
    same = {each.name for each in made if each.expression in chars}
    read = _union(each.expression for each in made if each.name not in same)
    chars |= same
    return read


def _union(expressions: Iterable[str | None]) -> frozenset[str]:
    return frozenset().union(*(reads(written) for written in expressions))

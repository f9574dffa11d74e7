"""Renders limits as SQL text: which changes matter, whether candidates run short, which are kept.

Everything is a window over the rows of the groups, without joins, so that a step can be prepared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from actors.engine.spark.exact_keys import exact_keys
from actors.engine.spark.fragments import UNION, Types, from_rows
from actors.model.plan.delta import (
    Node,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    columns_of,
)
from actors.model.plan.schema import DIFF, TIME, quote


class LimitRendering(ABC):
    """The part of `translate.PlanTranslator` that renders limits."""

    # Set by `PlanTranslator`: the types of nodes' columns, and whether all changes are at one time.
    _types: Types
    _one_time: bool

    @abstractmethod
    def _select(self, items: Sequence[str], below: Node) -> str: ...

    @abstractmethod
    def _hint(self, *hints: str) -> str: ...

    @abstractmethod
    def _empty(self, node: Node) -> bool: ...

    @abstractmethod
    def text(self, node: Node) -> str:
        """Return the SELECT that makes a node's updates."""

    def _united(self, parts: Sequence[str]) -> str:
        return f"SELECT {self._hint()}* {from_rows(UNION.join(parts))}"

    def _gate(self, node: TopGate) -> str:
        return self._gated(node.input, node.switch, node.keys, closes=node.closes)

    def _gated(self, below: Node, switch: Node, keys: Sequence[str], *, closes: bool) -> str:
        """Return the rows of a node in groups in which another node has any; with `closes`, in
        groups in which it has none."""
        names = [quote(name) for name in columns_of(below)]
        if self._empty(switch):
            kept = "" if closes else " WHERE false"
            return self._select([*names, TIME, DIFF], below) + kept
        # The first branch has the types: its columns are the input's.
        rows = self._select([*names, TIME, DIFF, "0 AS __gate"], below)
        group = [quote(key) for key in keys]
        nulls = [name if name in group else f"NULL AS {name}" for name in names]
        opened = self._select([*nulls, f"0L AS {TIME}", f"0L AS {DIFF}", "1 AS __gate"], switch)
        both = self._united([rows, opened])
        marked = f"SELECT *, max(__gate) OVER ({partition_by(group)}) AS __any {from_rows(both)}"
        wanted = 0 if closes else 1
        return (
            f"SELECT {', '.join([*names, TIME, DIFF])} {from_rows(marked)} "
            f"WHERE __gate = 0 AND __any = {wanted}"
        )

    def _top_covered(self, node: TopCovered) -> str:
        names = [quote(name) for name in columns_of(node)]
        if self._empty(node.edges):
            return self._select([*names, TIME, DIFF], node.changes)
        changes = self._select([*names, TIME, DIFF, "0 AS __edge"], node.changes)
        edges = self._select([*names, f"0L AS {TIME}", f"0L AS {DIFF}", "1 AS __edge"], node.edges)
        # By rank, since a frame up to the last row would be summed up again for each row.
        group, order = partition_by(map(quote, node.keys)), ", ".join(node.order)
        both = self._united([changes, edges])
        ranked = f"SELECT *, rank() OVER ({group} ORDER BY {order}) AS __rank {from_rows(both)}"
        bound = f"max(CASE WHEN __edge = 1 THEN __rank END) OVER ({group}) AS __bound"
        marked = f"SELECT *, {bound} {from_rows(ranked)}"
        return (
            f"SELECT {', '.join([*names, TIME, DIFF])} {from_rows(marked)} "
            "WHERE __edge = 0 AND (__bound IS NULL OR __rank <= __bound)"
        )

    def _top_shortage(self, node: TopShortage) -> str:
        keys = [quote(key) for key in node.keys]
        found = ", ".join(keys or ["1 AS short"])
        if self._empty(node):
            rows = from_rows(self.text(node.changes))
            return f"SELECT {found}, {TIME}, {DIFF} {rows} WHERE false"

        def part(below: Node, at: str, count: str, edge: int) -> str:
            return self._select(
                [*keys, f"{at} AS __at", f"{count} AS __n", f"{edge} AS __e"], below
            )

        rows = self._united(
            [
                part(node.changes, TIME, DIFF, 0),
                part(node.candidates, "-1L", DIFF, 0),
                part(node.edges, "-1L", "0L", 1),
            ]
        )
        made = f"SELECT {found}, max(__at) AS {TIME}, 1L AS {DIFF}"
        tail = f" GROUP BY {', '.join(keys)}" if keys else ""
        if self._one_time:
            few = f"max(__at) >= 0 AND max(__e) = 1 AND sum(__n) < {node.count}"
            return f"{made} {from_rows(rows)}{tail} HAVING {few}"
        group = partition_by(keys)
        left = (
            f"SELECT *, max(__e) OVER ({group}) AS __any, "
            f"sum(__n) OVER ({group} ORDER BY __at RANGE BETWEEN UNBOUNDED PRECEDING AND "
            f"CURRENT ROW) AS __left {from_rows(rows)}"
        )
        few = f"WHERE __at >= 0 AND __any = 1 AND __left < {node.count}"
        return f"{made} {from_rows(left)} {few}{tail} HAVING max(__at) >= 0"

    def _top_candidates(self, node: TopCandidates) -> str:
        names = [quote(name) for name in columns_of(node.changes)]
        weighed = self._weighed_candidates(node, names)
        cut = f"(__total > {node.most} OR __is_short = 1)"
        kept = f"CASE WHEN NOT {cut} OR __upto - __peers < {node.kept} THEN __new ELSE 0L END"
        stays = f"SELECT *, {cut} AS __cut, {kept} AS __kept {from_rows(weighed)}"
        # The last row that stays is the edge if others do not stay; of peers, any one. If all stay,
        # the old edge still holds for the rows that were left out before. A shortage has brought
        # these back.
        group = partition_by(map(quote, node.keys))
        placed = (
            f"SELECT *, sum(__kept) OVER ({group}) AS __all_kept, "
            f"max(CASE WHEN __kept > 0 THEN __row END) OVER ({group}) AS __last_row "
            f"{from_rows(stays)}"
        )
        new = "CASE WHEN __row = __last_row AND __all_kept < __total THEN 1L ELSE 0L END"
        moved = "__cut AND (__is_short = 1 OR __all_kept < __total)"
        edge = f"CASE WHEN {moved} THEN {new} - __edge ELSE 0L END"
        diffs = (("false", "__kept - __was"), ("true", edge))
        both = ", ".join(f"named_struct('m', {m}, 'd', {diff})" for m, diff in diffs)
        # Groups without a change in this step emit nothing.
        return (
            f"SELECT {', '.join(names)}, __x.m AS {quote(node.mark)}, __last AS {TIME}, "
            f"__x.d AS {DIFF} {from_rows(placed)} LATERAL VIEW explode(array({both})) __e AS __x "
            "WHERE __x.d <> 0 AND __last >= 0"
        )

    def _weighed_candidates(self, node: TopCandidates, names: Sequence[str]) -> str:
        """Return each row once, with its weights among the new and the old candidates and in the
        edge, and with the weight up to it in its group, and in total."""
        rows = self._candidate_rows(node, names)
        group = partition_by(map(quote, node.keys))
        # All windows have the same order, so that rows are sorted only once.
        order = f"{group} ORDER BY {', '.join(node.order)}"
        upto = "RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
        short = "0 AS __is_short"
        if not self._empty(node.shortage):
            short = f"max(__short) OVER ({group}) AS __is_short"
        marked = f"SELECT *, {short}, max(__at) OVER ({group}) AS __last {from_rows(rows)}"
        new = "__changed + CASE WHEN __is_short = 1 THEN __fresh ELSE __was END"
        weighed = f"SELECT *, {new} AS __new {from_rows(marked)}"
        return (
            f"SELECT *, sum(__new) OVER ({group}) AS __total, "
            f"row_number() OVER ({order}) AS __row, "
            f"sum(__new) OVER ({order} RANGE BETWEEN CURRENT ROW AND CURRENT ROW) AS __peers, "
            f"sum(__new) OVER ({order} {upto}) AS __upto {from_rows(weighed)}"
        )

    def _candidate_rows(self, node: TopCandidates, names: Sequence[str]) -> str:
        """Return each row once, with its weights in the changes, in the old candidates, in the rows
        that a shortage has brought, and in the edge."""
        sums = ("__changed", "__was", "__fresh", "__edge")

        def part(below: Node, at: str, **weights: str) -> str:
            made = [f"{weights.get(each, '0L')} AS {each}" for each in sums]
            return self._select([*names, f"{at} AS __at", *made, "0 AS __short"], below)

        parts = [
            part(node.changes, TIME, __changed=DIFF),
            part(node.candidates, "-1L", __was=DIFF),
            part(node.edges, "-1L", __edge=DIFF),
        ]
        if not self._empty(node.shortage):
            parts.append(part(node.rows, "-1L", __fresh=DIFF))
            keys = [quote(key) for key in node.keys]
            nulls = [name if name in keys else f"NULL AS {name}" for name in names]
            zeros = [f"0L AS {each}" for each in sums]
            short = [*nulls, "-1L AS __at", *zeros, "1 AS __short"]
            parts.append(self._select(short, node.shortage))
        exact = {quote(n): keys for n, keys in exact_keys(self._types(node.changes)).items()}
        items = [f"any_value({name}) AS {name}" if name in exact else name for name in names]
        grouped = [key for name in names for key in exact.get(name, (name,))]
        made = [f"CAST(sum({each}) AS bigint) AS {each}" for each in sums]
        made += ["max(__at) AS __at", "max(__short) AS __short"]
        return (
            f"SELECT {', '.join([*items, *made])} {from_rows(self._united(parts))} "
            f"GROUP BY {', '.join(grouped)}"
        )


def partition_by(keys: Iterable[str]) -> str:
    """Return the PARTITION BY of a window; "", for a single partition, if there are no keys.

    >>> partition_by(["`a`", "b"]), partition_by([])
    ('PARTITION BY `a`, b', '')
    """
    found = ", ".join(keys)
    return f"PARTITION BY {found}" if found else ""

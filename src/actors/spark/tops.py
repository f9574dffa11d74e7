"""Limits as SQL text: which changes matter, whether the reserve is used up, what is kept.

Everything is a window over few rows: no join, so that a step can be prepared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from actors.plan.delta import (
    Node,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    columns_of,
)
from actors.plan.schema import DIFF, TIME
from actors.spark.exact_groups import exact_keys
from actors.spark.fragments import UNION, Types, from_rows, quote


class Tops(ABC):
    """The part of `translate.Translator` that renders limits."""

    _types: Types

    @abstractmethod
    def _select(self, items: Sequence[str], below: Node) -> str: ...

    @abstractmethod
    def _hint(self, *hints: str) -> str: ...

    @abstractmethod
    def _empty(self, node: Node) -> bool: ...

    @abstractmethod
    def text(self, node: Node) -> str:
        """The SELECT that makes a node's updates."""

    def _united(self, parts: Sequence[str]) -> str:
        return f"SELECT {self._hint()}* {from_rows(UNION.join(parts))}"

    def _gate(self, node: TopGate) -> str:
        return self._gated(node.input, node.switch, closes=node.closes)

    def _gated(self, below: Node, switch: Node, *, closes: bool) -> str:
        """The rows of one node where another has any, or with `closes` has none."""
        names = [quote(name) for name in columns_of(below)]
        if self._empty(switch):
            kept = "" if closes else " WHERE false"
            return self._select([*names, TIME, DIFF], below) + kept
        # The first branch has the types: its columns are the input's.
        rows = self._select([*names, TIME, DIFF, "0 AS __gate"], below)
        nulls = [f"NULL AS {name}" for name in names]
        opened = self._select([*nulls, f"0L AS {TIME}", f"0L AS {DIFF}", "1 AS __gate"], switch)
        both = self._united([rows, opened])
        told = f"SELECT *, max(__gate) OVER () AS __any {from_rows(both)}"
        wanted = 0 if closes else 1
        return (
            f"SELECT {', '.join([*names, TIME, DIFF])} {from_rows(told)} "
            f"WHERE __gate = 0 AND __any = {wanted}"
        )

    def _top_covered(self, node: TopCovered) -> str:
        names = [quote(name) for name in columns_of(node)]
        changes = self._select([*names, TIME, DIFF, "0 AS __edge"], node.changes)
        if self._empty(node.edge):
            return self._select([*names, TIME, DIFF], node.changes)
        edge = self._select([*names, f"0L AS {TIME}", f"0L AS {DIFF}", "1 AS __edge"], node.edge)
        # By rank: a frame up to the last row is summed up anew for each row.
        order = ", ".join(node.order)
        both = self._united([changes, edge])
        ranked = f"SELECT *, rank() OVER (ORDER BY {order}) AS __rank {from_rows(both)}"
        at_edge = "max(CASE WHEN __edge = 1 THEN __rank END) OVER () AS __upto"
        told = f"SELECT *, {at_edge} {from_rows(ranked)}"
        return (
            f"SELECT {', '.join([*names, TIME, DIFF])} {from_rows(told)} "
            "WHERE __edge = 0 AND (__upto IS NULL OR __rank <= __upto)"
        )

    def _top_shortage(self, node: TopShortage) -> str:
        if self._empty(node):
            return f"SELECT 1 AS short, 0L AS {TIME}, 1L AS {DIFF} WHERE false"
        changes = self._select([f"{TIME} AS __at", f"{DIFF} AS __n", "0 AS __edge"], node.changes)
        rows = self._select(["-1L AS __at", f"{DIFF} AS __n", "0 AS __edge"], node.candidates)
        edge = self._select(["-1L AS __at", "0L AS __n", "1 AS __edge"], node.edge)
        told = (
            "SELECT *, max(__edge) OVER () AS __any, max(__at) OVER () AS __last, "
            "sum(__n) OVER (ORDER BY __at RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) "
            f"AS __left {from_rows(self._united([changes, rows, edge]))}"
        )
        return (
            f"SELECT 1 AS short, __last AS {TIME}, 1L AS {DIFF} {from_rows(told)} "
            f"WHERE __any = 1 AND __at >= 0 AND __left < {node.count} GROUP BY __last"
        )

    def _top_candidates(self, node: TopCandidates) -> str:
        names = [quote(name) for name in columns_of(node)]
        told = self._weighed_candidates(node, names)
        cut = f"(__total > {node.most} OR __is_short = 1)"
        kept = f"CASE WHEN NOT {cut} OR __upto - __peers < {node.kept} THEN __new ELSE 0L END"
        stays = f"SELECT *, {cut} AS __cut, {kept} AS __kept {from_rows(told)}"
        there = f"{DIFF} <> 0 AND {TIME} >= 0"  # where nothing has changed, nothing does
        if not node.edges:
            changed = f"SELECT {', '.join(names)}, __last AS {TIME}, __kept - __was AS {DIFF}"
            return f"SELECT * {from_rows(f'{changed} {from_rows(stays)}')} WHERE {there}"
        # The last that stays is the edge where others do not; of peers any one. Where all stay,
        # the old edge holds for the rows that were left out before; a shortage has brought these.
        reversed_place = (
            "SELECT *, sum(__kept) OVER () AS __all_kept, row_number() OVER (PARTITION BY "
            f"__kept > 0 ORDER BY __upto DESC) AS __place {from_rows(stays)}"
        )
        new = "CASE WHEN __kept > 0 AND __place = 1 AND __all_kept < __total THEN 1L ELSE 0L END"
        moved = "__cut AND (__is_short = 1 OR __all_kept < __total)"
        diff = f"CASE WHEN {moved} THEN {new} - __edge ELSE 0L END"
        changed = f"SELECT {', '.join(names)}, __last AS {TIME}, {diff} AS {DIFF}"
        return f"SELECT * {from_rows(f'{changed} {from_rows(reversed_place)}')} WHERE {there}"

    def _weighed_candidates(self, node: TopCandidates, names: Sequence[str]) -> str:
        """Each row once, with its weights among the new candidates and the old, and in the edge;
        and how much weight comes up to it and in all."""

        def part(below: Node, at: str, new: str, was: str, edge: str) -> str:
            weights = [f"{at} AS __at", f"{new} AS __new", f"{was} AS __was", f"{edge} AS __edge"]
            return self._select([*names, *weights, "0 AS __short"], below)

        parts = [
            part(node.changes, TIME, DIFF, "0L", "0L"),
            part(node.old, "-1L", DIFF, "0L", "0L"),
            part(node.candidates, "-1L", "0L", DIFF, "0L"),
            part(node.edge, "-1L", "0L", "0L", DIFF),
        ]
        nulls = [f"NULL AS {name}" for name in names]
        zeros = ["-1L AS __at", "0L AS __new", "0L AS __was", "0L AS __edge", "1 AS __short"]
        parts.append(self._select([*nulls, *zeros], node.shortage))
        exact = {quote(n): keys for n, keys in exact_keys(self._types(node.changes)).items()}
        items = [f"any_value({name}) AS {name}" if name in exact else name for name in names]
        grouped = [key for name in names for key in exact.get(name, (name,))]
        sums = [f"CAST(sum({each}) AS bigint) AS {each}" for each in ("__new", "__was", "__edge")]
        sums += ["max(__at) AS __at", "max(__short) AS __short"]
        rows = (
            f"SELECT {', '.join([*items, *sums])} {from_rows(self._united(parts))} "
            f"GROUP BY {', '.join(grouped)}"
        )
        order = ", ".join(node.order)
        return (
            "SELECT *, sum(__new) OVER () AS __total, max(__short) OVER () AS __is_short, "
            "max(__at) OVER () AS __last, "
            f"sum(__new) OVER (PARTITION BY {', '.join(names)}) AS __peers, "
            f"sum(__new) OVER (ORDER BY {order} RANGE BETWEEN UNBOUNDED PRECEDING AND "
            f"CURRENT ROW) AS __upto {from_rows(rows)}"
        )

"""Limits as SQL text: which changes matter, whether the reserve is used up, what is kept.

Everything is a window over the groups' rows: no join, so that a step can be prepared.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

from actors.plan.delta import (
    Node,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    Where,
    columns_of,
)
from actors.plan.schema import DIFF, TIME
from actors.spark.exact_groups import exact_keys
from actors.spark.fragments import UNION, Types, from_rows, quote

_SORT: Final = re.compile(r"(?: (?:ASC|DESC))?(?: NULLS (?:FIRST|LAST))?$")


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
        return self._gated(node.input, node.switch, node.keys, closes=node.closes)

    def _gated(self, below: Node, switch: Node, keys: Sequence[str], *, closes: bool) -> str:
        """The rows of one node in groups of which another has any, or with `closes` none."""
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
        told = f"SELECT *, max(__gate) OVER ({partition_by(group)}) AS __any {from_rows(both)}"
        wanted = 0 if closes else 1
        return (
            f"SELECT {', '.join([*names, TIME, DIFF])} {from_rows(told)} "
            f"WHERE __gate = 0 AND __any = {wanted}"
        )

    def _top_covered(self, node: TopCovered) -> str:
        names = [quote(name) for name in columns_of(node)]
        if self._empty(node.state):
            return self._select([*names, TIME, DIFF], node.changes)
        changes = self._select([*names, TIME, DIFF, "0 AS __edge"], node.changes)
        edges = Where(node.state, quote(node.mark))
        edge = self._select([*names, f"0L AS {TIME}", f"0L AS {DIFF}", "1 AS __edge"], edges)
        # By rank: a frame up to the last row is summed up anew for each row.
        group, order = partition_by(map(quote, node.keys)), ", ".join(node.order)
        both = self._united([changes, edge])
        ranked = f"SELECT *, rank() OVER ({group} ORDER BY {order}) AS __rank {from_rows(both)}"
        at_edge = f"max(CASE WHEN __edge = 1 THEN __rank END) OVER ({group}) AS __upto"
        told = f"SELECT *, {at_edge} {from_rows(ranked)}"
        return (
            f"SELECT {', '.join([*names, TIME, DIFF])} {from_rows(told)} "
            "WHERE __edge = 0 AND (__upto IS NULL OR __rank <= __upto)"
        )

    def _top_shortage(self, node: TopShortage) -> str:
        keys = [quote(key) for key in node.keys]
        found = ", ".join(keys or ["1 AS short"])
        changed = [*keys, f"{TIME} AS __at", f"{DIFF} AS __n", "0 AS __edge"]
        if self._empty(node):
            return (
                f"SELECT {found}, {TIME}, {DIFF} {from_rows(self.text(node.changes))} WHERE false"
            )
        edge = f"CAST({quote(node.mark)} AS int)"
        held = [*keys, "-1L AS __at", f"{DIFF} * (1 - {edge}) AS __n", f"{edge} AS __edge"]
        rows = self._united([self._select(changed, node.changes), self._select(held, node.state)])
        group = partition_by(keys)
        told = (
            f"SELECT *, max(__edge) OVER ({group}) AS __any, max(__at) OVER ({group}) AS __last, "
            f"sum(__n) OVER ({group} ORDER BY __at RANGE BETWEEN UNBOUNDED PRECEDING AND "
            f"CURRENT ROW) AS __left {from_rows(rows)}"
        )
        return (
            f"SELECT {found}, __last AS {TIME}, 1L AS {DIFF} {from_rows(told)} WHERE __any = 1 "
            f"AND __at >= 0 AND __left < {node.count} GROUP BY {', '.join([*keys, '__last'])}"
        )

    def _top_candidates(self, node: TopCandidates) -> str:
        names = [quote(name) for name in columns_of(node.changes)]
        group = [quote(key) for key in node.keys]
        told = self._weighed_candidates(node, names)
        cut = f"(__total > {node.most} OR __is_short = 1)"
        kept = f"CASE WHEN NOT {cut} OR __upto - __peers < {node.kept} THEN __new ELSE 0L END"
        stays = f"SELECT *, {cut} AS __cut, {kept} AS __kept {from_rows(told)}"
        # The last that stays is the edge where others do not; of peers any one. Where all stay,
        # the old edge holds for the rows that were left out before; a shortage has brought these.
        places = partition_by([*group, "__kept > 0"])
        placed = (
            f"SELECT *, sum(__kept) OVER ({partition_by(group)}) AS __all_kept, "
            f"row_number() OVER ({places} ORDER BY __upto DESC) AS __place {from_rows(stays)}"
        )
        new = "CASE WHEN __kept > 0 AND __place = 1 AND __all_kept < __total THEN 1L ELSE 0L END"
        moved = "__cut AND (__is_short = 1 OR __all_kept < __total)"
        edge = f"CASE WHEN {moved} THEN {new} - __edge ELSE 0L END"
        both = (
            f"named_struct('m', false, 'd', __kept - __was), named_struct('m', true, 'd', {edge})"
        )
        mark = quote(node.mark)
        # Where nothing has changed, nothing does.
        return (
            f"SELECT {', '.join(names)}, __x.m AS {mark}, __last AS {TIME}, __x.d AS {DIFF} "
            f"{from_rows(placed)} LATERAL VIEW explode(array({both})) __e AS __x "
            "WHERE __x.d <> 0 AND __last >= 0"
        )

    def _weighed_candidates(self, node: TopCandidates, names: Sequence[str]) -> str:
        """Each row once, with its weights among the new candidates and the old, and in the edge;
        and how much weight comes up to it in its group, and in all."""

        def part(below: Node, at: str, new: str, was: str, edge: str) -> str:
            weights = [f"{at} AS __at", f"{new} AS __new", f"{was} AS __was", f"{edge} AS __edge"]
            return self._select([*names, *weights, "0 AS __short"], below)

        mark, group = quote(node.mark), [quote(key) for key in node.keys]
        parts = [
            part(node.changes, TIME, DIFF, "0L", "0L"),
            part(node.old, "-1L", DIFF, "0L", "0L"),
            part(node.state, "-1L", "0L", f"IF({mark}, 0L, {DIFF})", f"IF({mark}, {DIFF}, 0L)"),
        ]
        if not self._empty(node.shortage):
            nulls = [name if name in group else f"NULL AS {name}" for name in names]
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
        whole = partition_by(group)
        peers = partition_by([*group, *map(sorted_value, node.order)])
        return (
            f"SELECT *, sum(__new) OVER ({whole}) AS __total, "
            f"max(__short) OVER ({whole}) AS __is_short, max(__at) OVER ({whole}) AS __last, "
            f"sum(__new) OVER ({peers}) AS __peers, "
            f"sum(__new) OVER ({whole} ORDER BY {', '.join(node.order)} RANGE BETWEEN "
            f"UNBOUNDED PRECEDING AND CURRENT ROW) AS __upto {from_rows(rows)}"
        )


def partition_by(keys: Iterable[str]) -> str:
    """Return the PARTITION BY of a window; of all rows where there are no keys.

    >>> partition_by(["`a`", "b"]), partition_by([])
    ('PARTITION BY `a`, b', '')
    """
    found = ", ".join(keys)
    return f"PARTITION BY {found}" if found else ""


def sorted_value(order: str) -> str:
    """Return the expression of a sort order.

    >>> sorted_value("a DESC NULLS LAST"), sorted_value("(b + 1)")
    ('a', '(b + 1)')
    """
    return _SORT.sub("", order)

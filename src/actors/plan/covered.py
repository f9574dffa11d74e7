"""Changes of a table up to the edges of their groups: all that may move the groups' first rows.

Of a group whose first rows are kept (`views.rule_top`) a hidden state holds the last one, its edge;
a change behind the edge does not affect the view. Where group and order are columns of a table,
that is known before Spark runs, and where no change is left Spark does not run at all.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa

from actors.plan.nearby import SortColumn, group_codes, order_codes


class CoveredChanges(msgspec.Struct, frozen=True):
    """The input ``k{n}`` of a step: the changes ``d{source}`` that stand no further than the edge
    of their group, which is in ``h{edges}``, and all changes of groups without one.

    `keys` and `order` are columns of the table, the `edge_columns` those of the state for them.
    """

    source: int
    edges: int
    keys: tuple[str, ...]
    order: tuple[SortColumn, ...]
    edge_columns: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the table that are read: keys, then order."""
        return (*self.keys, *(each.column for each in self.order))

    def text(self) -> str:
        """Return a text for people that says which changes these are."""
        by = f" by {', '.join(self.keys)}" if self.keys else ""
        return f"up to the edges in h{self.edges}{by}"


def covered_changes(
    changes: pa.Table, edges: pa.Table, covered: CoveredChanges
) -> tuple[pa.Table, pa.Table]:
    """Return the changes up to the edges, and the edges of their groups.

    Args:
        changes: Updates of the table.
        edges: Settled rows of the edges' state, at least those of the changes' groups.
        covered: What to compare.
    """
    if not changes.num_rows or not edges.num_rows:
        return changes, edges.slice(0, 0)
    names = [f"c{place}" for place in range(len(covered.columns))]
    given = changes.select(covered.columns).rename_columns(names)
    bounds = edges.select(covered.edge_columns).rename_columns(names).cast(given.schema)
    both = pa.concat_tables([given, bounds]).combine_chunks()
    width = len(covered.keys)
    group = group_codes(both, names[:width])
    codes = [
        order_codes(both[name], by) for name, by in zip(names[width:], covered.order, strict=True)
    ]
    _, place = np.unique(np.stack(codes), axis=1, return_inverse=True)
    place = place.reshape(-1)
    count = changes.num_rows
    # A group without an edge has all of its changes before it.
    last = np.full(int(group.max()) + 1, len(place), np.int64)
    last[group[count:]] = place[count:]
    kept = place[:count] <= last[group[:count]]
    touched = np.zeros(len(last), np.bool_)
    touched[group[:count][kept]] = True
    return changes.filter(pa.array(kept)), edges.filter(pa.array(touched[group[count:]]))

"""Decides in which of four ways the rows of a read are found. Pure.

- **memory**: the rows are in the controller's memory: a table arranged by its PRIMARY KEY, or the
  service's own state;
- **index**: an arrangement that is partitioned over all workers, looked up or scanned;
- **shard**: one worker reads the parts of the object in the store;
- **spark**: a job over the contents of everything that the query names.

A query is a plain read of one object, or it is left to Spark (`choose_query`). For a plain read
`choose_ways` returns all ways that give its rows, the cheapest first; the reader takes the first
one that is ready at the time of the read. So a read by PRIMARY KEY is answered from the shard until
the table is arranged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from actors.engine.views.compile import CHANGES_MEANING
from actors.engine.views.plain_read import PlainRead, parse_plain_read
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import from_ipc
from actors.model.protocol.message_parts import ColumnComparison
from actors.runtime.progress import ObjectId

ReadWay: TypeAlias = Literal["memory", "index", "shard"]

NOT_PLAIN: Final = (
    "it is more than a plain read: columns, comparisons, order and limit of one object"
)

_FLOATING: Final = frozenset({"float", "real", "double"})


class KnownIndex(msgspec.Struct, frozen=True):
    """An index on an object."""

    id: ObjectId
    name: str
    key: tuple[str, ...]


class ReadChoice(msgspec.Struct, frozen=True):
    """A way to read. `key`: the columns by which rows are looked up; () if all rows are scanned."""

    way: ReadWay
    key: tuple[str, ...] = ()
    index: KnownIndex | None = None
    own: bool = False
    """True if the changes of the session's open transaction are applied to the rows."""

    @property
    def reason(self) -> str:
        """Return the reason why rows are found in this way, as readable text."""
        key = f"({', '.join(self.key)})"
        match self.way:
            case "memory" if self.own:
                return "by PRIMARY KEY, with the changes of the open transaction applied"
            case "memory":
                return f"by PRIMARY KEY {key}" if self.key else "the service's own state"
            case "index":
                name = "" if self.index is None else self.index.name
                return (
                    f"{name} {key}"
                    if self.key
                    else f"{name}, full scan: its rows are already consolidated"
                )
        return "no index on these columns is ready"


class QueryChoice(msgspec.Struct, frozen=True):
    """The plain read that a query is, or None and the reason why Spark runs the query."""

    read: PlainRead | None
    reason: str = ""


def choose_query(
    sql: str,
    schemas: Mapping[str, TableSchema],
    conf: Iterable[str] = (),
    changed: Collection[str] = (),
) -> QueryChoice:
    """Return whether a query is a plain read or is left to Spark.

    Args:
        sql: The query in Spark's dialect, with its plain views inlined.
        schemas: The columns of the objects that it may name.
        conf: Names of the Spark settings that apply to it.
        changed: Tables that the session's open transaction has changed.

    >>> from actors.model.plan.schema import TableColumn
    >>> columns = TableColumn("a", "bigint"), TableColumn("b", "bigint")
    >>> tables = {"t": TableSchema(columns, ("a",))}
    >>> choose_query("SELECT b FROM t WHERE a = 1", tables).read.project
    ('b',)
    >>> choose_query("SELECT count(*) FROM t", tables).reason
    'it is more than a plain read: columns, comparisons, order and limit of one object'
    >>> choose_query("SELECT b FROM t WHERE b = 1", tables, changed={"t"}).reason
    'the open transaction has changed t'
    """
    # Under such a setting, a text may not mean what `parse_plain_read` assumes.
    for name in conf:
        if name.lower().startswith(CHANGES_MEANING):
            return QueryChoice(None, f"the setting {name} may change the meaning of the query")
    read = parse_plain_read(sql, schemas)
    if read is None:
        return QueryChoice(None, NOT_PLAIN)
    if read.name in changed and not _is_of_one_key(read, schemas[read.name]):
        return QueryChoice(None, f"the open transaction has changed {read.name}")
    return QueryChoice(read)


def _is_of_one_key(read: PlainRead, schema: TableSchema) -> bool:
    """Return whether the rows that a read finds can be matched by key with those that a transaction
    has changed."""
    key = [column for column in schema.columns if column.name in schema.key]
    # NaN equals itself in Spark, but not among the keys that the session compares.
    if not key or read.finishing or any(each.type.lower() in _FLOATING for each in key):
        return False
    return {each.name for each in key} <= fixed_columns(read.filter)


def fixed_columns(filter: Sequence[ColumnComparison]) -> frozenset[str]:
    """Return the columns that a filter compares with a single value each."""
    return frozenset(each.column for each in filter if each.op == "=")


def choose_ways(
    primary_key: tuple[str, ...],
    indexes: Iterable[KnownIndex],
    fixed: Collection[str],
    *,
    by_key: bool = False,
) -> tuple[ReadChoice, ...]:
    """Return the ways to read an object, the cheapest first.

    Args:
        primary_key: Columns by which a table is arranged; () for other objects.
        indexes: The indexes on the object.
        fixed: Columns that the read restricts to one value, or to one of several.
        by_key: Whether `fixed` are the columns of given keys rather than of a filter.

    >>> by_kind = KnownIndex("u7", "by_kind", ("kind",))
    >>> ways = choose_ways(("id",), [by_kind], {"id", "kind"})
    >>> for each in ways[:3]:
    ...     print(f"{each.way}: {each.reason}")
    memory: by PRIMARY KEY (id)
    index: by_kind (kind)
    index: by_kind, full scan: its rows are already consolidated
    >>> [each.way for each in choose_ways(("id",), [by_kind], {"name"}, by_key=True)]
    ['shard']
    """
    ways = []
    if primary_key and set(primary_key) <= set(fixed):
        ways.append(ReadChoice("memory", primary_key))
    known = list(indexes)
    # An index that narrows the read is looked up. Any other is scanned, which still saves
    # consolidating the rows.
    narrow = [each for each in known if each.key and set(each.key) <= set(fixed)]
    ways += [ReadChoice("index", each.key, each) for each in narrow]
    # The statistics of a shard's parts exclude parts without the keys; an index has no statistics.
    if not by_key:
        ways += [ReadChoice("index", (), each) for each in known]
    return (*ways, ReadChoice("shard"))


def explain_read(read: PlainRead, way: ReadChoice) -> list[str]:
    """Return how the rows of a plain read are found, as lines of text."""
    lines = [f"Read of {read.name}, without Spark", f"  from {way.way}: {way.reason}"]
    lines.append(f"  columns: {', '.join(read.project)}")
    if read.filter:
        lines.append(f"  filter: {' AND '.join(map(_comparison_text, read.filter))}")
    if read.finishing is not None:
        order = ", ".join(each.column for each in read.finishing.order_by) or "none"
        lines.append(f"  order: {order}; limit: {read.finishing.limit}")
    return lines


def _comparison_text(comparison: ColumnComparison) -> str:
    """Return a comparison as SQL, except for how its value is written."""
    text = f"{comparison.column} {comparison.op}"
    if not comparison.value:
        return text
    (value,) = from_ipc(comparison.value)[0].to_pylist()
    return f"{text} {value!r}" if isinstance(value, str) else f"{text} {value}"


def explain_spark(names: Sequence[str], reason: str) -> list[str]:
    """Return why Spark runs a query that names these objects, as lines of text."""
    return [f"Run by Spark, over {', '.join(names) or 'no table'}", f"  reason: {reason}"]

"""Decides by which of four ways the rows of a read are found. Pure.

- **memory**: the rows are in the controller's memory: a table arranged by its PRIMARY KEY, or what
  the service knows about itself;
- **index**: an arrangement that all workers keep together, looked up or scanned;
- **shard**: one worker reads the parts of the object in the store;
- **spark**: a job over the contents of all that the query names.

A query is a plain read of one object, or it is Spark's (`choose_query`). For a plain read
`choose_ways` names all ways that give its rows, the cheapest first: whoever reads takes the first
one that is ready at the time that is read. So a read by PRIMARY KEY is answered from the shard
until the table is arranged.
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

NOT_PLAIN: Final = "it is more than columns, comparisons, order and limit of one object"

_FLOATING: Final = frozenset({"float", "real", "double"})


class KnownIndex(msgspec.Struct, frozen=True):
    """An index on an object."""

    id: ObjectId
    name: str
    key: tuple[str, ...]


class ReadChoice(msgspec.Struct, frozen=True):
    """One way to read. `key`: the columns by which rows are looked up; none: all are looked at."""

    way: ReadWay
    key: tuple[str, ...] = ()
    index: KnownIndex | None = None
    own: bool = False
    """True if the changes of the session's open transaction are laid over the rows."""

    @property
    def reason(self) -> str:
        """Return why rows are found in this way, for people."""
        key = f"({', '.join(self.key)})"
        match self.way:
            case "memory" if self.own:
                return "by PRIMARY KEY, with the changes of the open transaction over it"
            case "memory":
                return f"by PRIMARY KEY {key}" if self.key else "what the service knows of itself"
            case "index":
                name = "" if self.index is None else self.index.name
                return f"{name} {key}" if self.key else f"{name}, whole: its rows are summed up"
        return "no index of these columns is ready"


class QueryChoice(msgspec.Struct, frozen=True):
    """The read that a query is; None: Spark runs it, for this reason."""

    read: PlainRead | None
    reason: str = ""


def choose_query(
    sql: str,
    schemas: Mapping[str, TableSchema],
    conf: Iterable[str] = (),
    changed: Collection[str] = (),
) -> QueryChoice:
    """Return whether a query is a plain read or Spark's.

    Args:
        sql: The query in Spark's dialect, with its plain views inlined.
        schemas: The columns of the objects that it may name.
        conf: Names of the settings of Spark that hold for it.
        changed: Tables that the session's open transaction has changed.

    >>> from actors.model.plan.schema import TableColumn
    >>> columns = TableColumn("a", "bigint"), TableColumn("b", "bigint")
    >>> tables = {"t": TableSchema(columns, ("a",))}
    >>> choose_query("SELECT b FROM t WHERE a = 1", tables).read.project
    ('b',)
    >>> choose_query("SELECT count(*) FROM t", tables).reason
    'it is more than columns, comparisons, order and limit of one object'
    >>> choose_query("SELECT b FROM t WHERE b = 1", tables, changed={"t"}).reason
    'the changes of the open transaction are laid over t'
    """
    # Such a setting gives a text another meaning than it has to `parse_plain_read`.
    for name in conf:
        if name.lower().startswith(CHANGES_MEANING):
            return QueryChoice(None, f"the setting {name} may change what its text means")
    read = parse_plain_read(sql, schemas)
    if read is None:
        return QueryChoice(None, NOT_PLAIN)
    if read.name in changed and not _is_of_one_key(read, schemas[read.name]):
        return QueryChoice(None, f"the changes of the open transaction are laid over {read.name}")
    return QueryChoice(read)


def _is_of_one_key(read: PlainRead, schema: TableSchema) -> bool:
    """Return whether the rows can be told from those that a transaction has changed."""
    key = [column for column in schema.columns if column.name in schema.key]
    # NaN equals itself to Spark, and not among the keys that the session compares.
    if not key or read.finishing or any(each.type.lower() in _FLOATING for each in key):
        return False
    return {each.name for each in key} <= fixed_columns(read.filter)


def fixed_columns(filter: Sequence[ColumnComparison]) -> frozenset[str]:
    """Return the columns that a filter compares with one value each."""
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
        primary_key: Columns by which a table is arranged; none for other objects.
        indexes: Those on the object.
        fixed: Columns that the read fixes to a value, or to one of several.
        by_key: Whether `fixed` are the columns of given keys; else they are of a filter.

    >>> by_kind = KnownIndex("u7", "by_kind", ("kind",))
    >>> ways = choose_ways(("id",), [by_kind], {"id", "kind"})
    >>> [f"{each.way}: {each.reason}" for each in ways[:3]]
    ['memory: by PRIMARY KEY (id)', 'index: by_kind (kind)', 'index: by_kind, whole: its rows are \
summed up']
    >>> [each.way for each in choose_ways(("id",), [by_kind], {"name"}, by_key=True)]
    ['shard']
    """
    ways = []
    if primary_key and set(primary_key) <= set(fixed):
        ways.append(ReadChoice("memory", primary_key))
    known = list(indexes)
    # An index that narrows is looked up; any other is walked, which still spares the summing up.
    narrow = [each for each in known if each.key and set(each.key) <= set(fixed)]
    ways += [ReadChoice("index", each.key, each) for each in narrow]
    # The statistics of a shard's parts exclude those without the keys; an index has none.
    if not by_key:
        ways += [ReadChoice("index", (), each) for each in known]
    return (*ways, ReadChoice("shard"))


def explain_read(read: PlainRead, way: ReadChoice) -> list[str]:
    """Return how the rows of a plain read are found, a line each."""
    lines = [f"Read of {read.name}, without Spark", f"  from {way.way}: {way.reason}"]
    lines.append(f"  columns: {', '.join(read.project)}")
    if read.filter:
        lines.append(f"  filter: {' AND '.join(map(_comparison_text, read.filter))}")
    if read.finishing is not None:
        order = ", ".join(each.column for each in read.finishing.order_by) or "none"
        lines.append(f"  order: {order}; limit: {read.finishing.limit}")
    return lines


def _comparison_text(comparison: ColumnComparison) -> str:
    """Return a comparison as SQL, but for how its value is written."""
    text = f"{comparison.column} {comparison.op}"
    if not comparison.value:
        return text
    (value,) = from_ipc(comparison.value)[0].to_pylist()
    return f"{text} {value!r}" if isinstance(value, str) else f"{text} {value}"


def explain_spark(names: Sequence[str], reason: str) -> list[str]:
    """Return why Spark runs a query that names these objects, a line each."""
    return [f"Run by Spark, over {', '.join(names) or 'no table'}", f"  reason: {reason}"]

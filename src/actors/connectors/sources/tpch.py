"""TPC-H: all eight tables at a scale factor, followed by pairs of refresh functions.

Theory of operation. Orders are numbered in the order of their creation. The first ones are the
benchmark's own, which `tpchgen-cli` writes as Parquet files into the scratch folder; later ones are
generated here (`NewOrders`). Refresh function 1 (even events) appends to this range, and refresh
function 2 (odd events) removes from its start, both including lineitems. Each is a separate
transaction. After each pair there are as many orders as initially.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import lru_cache
from pathlib import Path
from subprocess import CalledProcessError
from typing import Final

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.connectors.sources.generators import GeneratorConfig, at_least
from actors.connectors.sources.random_draws import (
    DrawStream,
    Numbers,
    decimals,
    joined,
    numbered,
    padded,
)
from actors.connectors.sources.source import SourceExport, SourceRows, SourceUnreachable
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import ActorClock

# -- new orders ------------------------------------------------------------------------------------


def _schema(text: str, key: str) -> TableSchema:
    kinds = {"key": "bigint", "money": "decimal(12,2)", "text": "string"}
    columns = [part.split() for part in text.split(",")]
    made = tuple(TableColumn(name, kinds.get(kind, kind), False) for name, kind in columns)
    return TableSchema(made, tuple(key.split()))


SCHEMAS: Final[dict[str, TableSchema]] = {
    "customer": _schema(
        "c_custkey key, c_name text, c_address text, c_nationkey key, c_phone text, "
        "c_acctbal money, c_mktsegment text, c_comment text",
        "c_custkey",
    ),
    "lineitem": _schema(
        "l_orderkey key, l_partkey key, l_suppkey key, l_linenumber int, l_quantity money, "
        "l_extendedprice money, l_discount money, l_tax money, l_returnflag text, "
        "l_linestatus text, l_shipdate date, l_commitdate date, l_receiptdate date, "
        "l_shipinstruct text, l_shipmode text, l_comment text",
        "l_orderkey l_linenumber",
    ),
    "nation": _schema(
        "n_nationkey key, n_name text, n_regionkey key, n_comment text", "n_nationkey"
    ),
    "orders": _schema(
        "o_orderkey key, o_custkey key, o_orderstatus text, o_totalprice money, "
        "o_orderdate date, o_orderpriority text, o_clerk text, o_shippriority int, o_comment text",
        "o_orderkey",
    ),
    "part": _schema(
        "p_partkey key, p_name text, p_mfgr text, p_brand text, p_type text, p_size int, "
        "p_container text, p_retailprice money, p_comment text",
        "p_partkey",
    ),
    "partsupp": _schema(
        "ps_partkey key, ps_suppkey key, ps_availqty int, ps_supplycost money, ps_comment text",
        "",  # at small scales the benchmark's data contains duplicate pairs
    ),
    "region": _schema("r_regionkey key, r_name text, r_comment text", "r_regionkey"),
    "supplier": _schema(
        "s_suppkey key, s_name text, s_address text, s_nationkey key, s_phone text, "
        "s_acctbal money, s_comment text",
        "s_suppkey",
    ),
}
"""Schemas of the eight tables, by name."""

FIRST_DATE: Final = 8035
"""1992-01-01, in days since the epoch."""
LAST_ORDER_DATE: Final = 10_440
"""1998-08-02, 151 days before the last date in the data."""
TODAY: Final = 9298
"""1995-06-17. Lines received by this day may have been returned."""
PRIORITIES: Final = ("1-URGENT", "2-HIGH", "3-MEDIUM", "4-NOT SPECIFIED", "5-LOW")
INSTRUCTIONS: Final = ("DELIVER IN PERSON", "COLLECT COD", "NONE", "TAKE BACK RETURN")
MODES: Final = ("REG AIR", "AIR", "RAIL", "SHIP", "TRUCK", "MAIL", "FOB")
LINES_MAX: Final = 7
COMMENTS: Final = 4096
_WORDS_EACH: Final = 24
"""Number of words drawn per comment, more than the longest comment has."""
_WORDS: Final = (
    "furiously carefully quickly slyly blithely even final ironic special express regular pending "
    "silent bold foxes ideas theodolites pinto-beans instructions dependencies excuses platelets "
    "asymptotes courts dolphins sleep wake haggle nag use boost affix detect integrate among above"
)


def order_keys(numbers: Numbers, orders: int) -> Numbers:
    """Return the keys of orders by their numbers. `orders` is the initial number of orders."""
    place = numbers % orders + 1
    turn = numbers // orders
    # Keys are sparse: of every 32 keys, the first eight are for the initial orders, and the next
    # three groups of eight for later orders, in turn. The group changes whenever all orders have
    # been replaced.
    eight = np.where(turn == 0, 0, 1 + (turn - 1) % 3)
    return (place >> 3 << 5) | (eight << 3) | (place & 7)


@lru_cache(maxsize=4)
def _comments(seed: int) -> dict[str, pa.Array]:
    return {
        table: _pool(DrawStream(seed, f"{table} comments"), *lengths)
        for table, lengths in (("orders", (19, 78)), ("lineitem", (10, 43)))
    }


def _pool(draws: DrawStream, length_min: int, length_max: int) -> pa.Array:
    """Return comments of random words, with lengths in this range except for trailing spaces."""
    words = np.array(_WORDS.split())
    chosen = words[draws.below(numbered(0, COMMENTS * _WORDS_EACH), len(words))]
    lengths = length_min + draws.below(~numbered(0, COMMENTS), length_max - length_min + 1)
    texts = [" ".join(row) for row in chosen.reshape(COMMENTS, _WORDS_EACH).tolist()]
    cut = [text[:length].strip() for text, length in zip(texts, lengths.tolist(), strict=True)]
    return pa.array(cut, pa.string())


class NewOrders:
    """Generates orders and lineitems by number, at a scale factor.

    An order is a function of its number (from 0, in the order of creation), so its retraction
    repeats it exactly. Distributions, keys, prices and dates are those of clause 4.2.3 of the
    specification. Comments consist of its words, and are taken from a pool.
    """

    def __init__(self, seed: int, scale: float, orders: int) -> None:
        self._orders = orders
        self._customers = max(3, int(150_000 * scale))
        self._suppliers = max(4, int(10_000 * scale))
        self._parts = max(1, int(200_000 * scale))
        self._clerks = max(1, int(1_000 * scale))
        self._seed = seed
        self._comments = _comments(seed)

    def _draws(self, stream: str) -> DrawStream:
        return DrawStream(self._seed, stream)

    def rows(self, start: int, stop: int) -> dict[str, pa.Table]:
        """Return orders `start` to ``stop - 1`` and their lineitems, with the types of
        `SCHEMAS`."""
        orders = numbered(start, stop)
        keys = order_keys(orders, self._orders)
        dates = FIRST_DATE + self._draws("date").below(orders, LAST_ORDER_DATE - FIRST_DATE + 1)
        counts = 1 + self._draws("lines").below(orders, LINES_MAX)
        firsts = np.cumsum(counts) - counts
        place = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(firsts, counts)
        lines = np.repeat(orders, counts) * LINES_MAX + place
        columns, price, opened = self._lines(lines, np.repeat(dates, counts))
        columns = [np.repeat(keys, counts), columns[0], columns[1], place + 1, *columns[2:]]
        total = np.add.reduceat(price, firsts)
        still = np.add.reduceat(opened.astype(np.int64), firsts)
        status = np.where(still == 0, 0, np.where(still == counts, 1, 2))
        # Every third customer has no orders.
        customer = self._draws("customer").below(orders, self._customers // 3 * 2)
        clerk = 1 + self._draws("clerk").below(orders, self._clerks)
        made = [
            keys,
            customer // 2 * 3 + customer % 2 + 1,
            pa.array(["F", "O", "P"]).take(pa.array(status)),
            decimals(total, pa.decimal128(12, 2)),
            dates,
            self._choice("priority", orders, pa.array(PRIORITIES)),
            joined("Clerk#", padded(clerk, 9)),
            np.zeros_like(keys),
            self._choice("orders comment", orders, self._comments["orders"]),
        ]
        return {"orders": _table("orders", made), "lineitem": _table("lineitem", columns)}

    def _lines(
        self, lines: Numbers, ordered: Numbers
    ) -> tuple[list[pa.Array | np.ndarray], Numbers, np.ndarray]:
        """Return the columns of lineitem except for the order key and the line number, the prices
        in cents including tax, and which lines are not shipped yet."""
        part = 1 + self._draws("part").below(lines, self._parts)
        nth, many = self._draws("supplier").below(lines, 4), self._suppliers
        supplier = (part + nth * (many // 4 + (part - 1) // many)) % many + 1
        quantity = 1 + self._draws("quantity").below(lines, 50)
        retail = 90_000 + part // 10 % 20_001 + 100 * (part % 1000)
        price = quantity * retail
        discount = self._draws("discount").below(lines, 11)
        tax = self._draws("tax").below(lines, 9)
        shipped = ordered + 1 + self._draws("ship").below(lines, 121)
        committed = ordered + 30 + self._draws("commit").below(lines, 61)
        received = shipped + 1 + self._draws("receipt").below(lines, 30)
        flag = np.where(received <= TODAY, self._draws("returned").below(lines, 2), 2)
        opened = shipped > TODAY
        money = pa.decimal128(12, 2)
        columns: list[pa.Array | np.ndarray] = [
            part,
            supplier,
            decimals(quantity * 100, money),
            decimals(price, money),
            decimals(discount, money),
            decimals(tax, money),
            pa.array(["R", "A", "N"]).take(pa.array(flag)),
            pa.array(["F", "O"]).take(pa.array(opened.astype(np.int64))),
            shipped,
            committed,
            received,
            self._choice("instructions", lines, pa.array(INSTRUCTIONS)),
            self._choice("mode", lines, pa.array(MODES)),
            self._choice("lineitem comment", lines, self._comments["lineitem"]),
        ]
        return columns, price * (100 - discount) // 100 * (100 + tax) // 100, opened

    def _choice(self, stream: str, numbers: Numbers, among: pa.Array) -> pa.Array:
        return among.take(pa.array(self._draws(stream).below(numbers, len(among))))


def _table(name: str, columns: list[pa.Array | np.ndarray]) -> pa.Table:
    shape = SCHEMAS[name].arrow()
    arrays = []
    for column, field in zip(columns, shape, strict=True):
        made = column if isinstance(column, pa.Array) else pa.array(column)
        if pa.types.is_date(field.type):
            made = made.cast(pa.int32())
        arrays.append(made.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=shape)


def weighed(rows: pa.Table, diff: int) -> pa.Table:
    """Return the rows with this `DIFF`."""
    diffs = pa.array(np.full(rows.num_rows, diff, np.int64))
    return rows.append_column(pa.field(DIFF, pa.int64()), diffs)


# -- the series ------------------------------------------------------------------------------------

TOOL: Final = "tpchgen-cli"
ORDERS: Final = 1_500_000
"""Number of orders at scale factor 1."""
REFRESH_ORDERS: Final = 1_500
"""Number of orders per refresh function, at scale factor 1."""
ORDERS_AT_ONCE: Final = 10_000
"""Number of orders in a piece, with about four times as many lineitems."""
GROUPS_KEPT: Final = 2
"""Number of decoded row groups that are cached per file."""
SCALE_MAX: Final = 1_000.0
REFRESHED: Final = ("orders", "lineitem")
_KEYS: Final = {"orders": "o_orderkey", "lineitem": "l_orderkey"}


class TpchConfig(GeneratorConfig, frozen=True, kw_only=True, tag="tpch"):
    """Configuration of a TPC-H generator. An event is a refresh function."""

    scale: float = 0.01
    orders_per_refresh: int | None = None
    """Number of orders per refresh function. None: a thousandth of all orders, as in the
    benchmark."""

    def check(self) -> None:
        """Raise `InvalidUsage` if an option is out of range."""
        super().check()
        if not 0.001 <= self.scale <= SCALE_MAX:
            raise InvalidUsage(f"invalid scale {self.scale}: expected 0.001 to {SCALE_MAX}")
        if self.orders_per_refresh is not None:
            at_least(self, orders_per_refresh=1)
            if self.orders_per_refresh > int(ORDERS * self.scale):
                raise InvalidUsage(
                    f"invalid orders_per_refresh {self.orders_per_refresh}: at scale {self.scale} "
                    f"there are only {int(ORDERS * self.scale)} orders"
                )


class TpchSeries:
    """Event ``2 n`` inserts the n-th set of new orders; event ``2 n + 1`` deletes the oldest
    set."""

    exports = tuple(SourceExport(name, schema) for name, schema in SCHEMAS.items())
    turns = 1.0

    def __init__(self, config: TpchConfig, clock: ActorClock, scratch: Path) -> None:
        self._config = config
        self._clock = clock
        self._folder = scratch / f"tpch-{uuid.uuid4().hex}"
        self._orders = int(ORDERS * config.scale)
        self._each = config.orders_per_refresh or max(1, int(REFRESH_ORDERS * config.scale))
        self._new = NewOrders(config.seed, config.scale, self._orders)
        # Files of the benchmark's data, by table; empty until `prepare`.
        self._tables: dict[str, _Table] = {}
        self.events_at_once = max(1, ORDERS_AT_ONCE // self._each // 2 * 2)

    async def prepare(self, at: int, wanted: AbstractSet[str]) -> None:
        """Generate the files that are still needed after `at` events. Raises `InvalidUsage` and
        `SourceUnreachable`."""
        tables = set(wanted)
        # Once all initial orders have been deleted, their files are no longer needed.
        if self._range(at)[0] >= self._orders:
            tables -= set(REFRESHED)
        elif tables & set(REFRESHED):
            tables |= set(REFRESHED)
        if not tables:
            return
        await self._generate(tables)
        self._tables = await self._clock.run_blocking(lambda: self._opened(tables))

    def contents(self, at: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield all rows of the wanted tables after `at` events."""
        for name in sorted(wanted - set(REFRESHED)):
            for rows in self._tables[name].all():
                yield SourceRows(name, weighed(rows, 1))
        yield from self._weighed(*self._range(at), 1, wanted)

    def changes(self, start: int, stop: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield the orders and lineitems that these events insert or delete."""
        for event in range(start, stop):
            first = event // 2 * self._each
            if event % 2 == 0:
                first += self._orders
            yield from self._weighed(first, first + self._each, 1 - event % 2 * 2, wanted)

    async def release(self) -> None:
        """Remove the generated files."""
        self._tables = {}
        with anyio.CancelScope(shield=True):
            folder = self._folder
            await self._clock.run_blocking(lambda: shutil.rmtree(folder, ignore_errors=True))

    # -- orders by number -------------------------------------------------------------------------

    def _range(self, at: int) -> tuple[int, int]:
        """Return the range of order numbers that exist after `at` events."""
        return at // 2 * self._each, self._orders + (at + 1) // 2 * self._each

    def _weighed(
        self, start: int, stop: int, diff: int, wanted: AbstractSet[str]
    ) -> Iterator[SourceRows]:
        """Yield orders `start` to ``stop - 1`` with their lineitems, in pieces."""
        if not wanted & set(REFRESHED):
            return
        while start < stop:
            end = min(stop, start + ORDERS_AT_ONCE)
            if start < self._orders:
                end = min(end, self._orders)
                # Among the initial orders, keys ascend with the numbers.
                first, last = order_keys(numbered(start, end), self._orders)[[0, -1]].tolist()
                rows = {
                    name: self._tables[name].between(_KEYS[name], first, last)
                    for name in REFRESHED
                    if name in wanted
                }
            else:
                rows = self._new.rows(start, end)
            for name in REFRESHED:
                if name in wanted:
                    yield SourceRows(name, weighed(rows[name], diff))
            start = end

    # -- the benchmark's own data -----------------------------------------------------------------

    async def _generate(self, tables: AbstractSet[str]) -> None:
        # Prefer the environment's own tool, even if PATH does not contain it.
        bundled = Path(sys.executable).parent / TOOL
        tool = str(bundled) if bundled.is_file() else shutil.which(TOOL)
        if tool is None:
            raise InvalidUsage(
                f"TPC-H data is generated by {TOOL}, which is not installed: pip install "
                "'penstock-views[tpch]'"
            )
        folder = self._folder
        await self._clock.run_blocking(lambda: folder.mkdir(parents=True, exist_ok=True))
        names = ",".join(sorted(tables))
        command = [tool, "parquet", "-s", repr(self._config.scale), "--tables", names, "--quiet"]
        try:
            await anyio.run_process([*command, "--output-dir", str(self._folder)])
        except (CalledProcessError, OSError) as error:
            said = getattr(error, "stderr", b"") or str(error).encode()
            raise SourceUnreachable(
                f"{TOOL} failed: {said.decode(errors='replace').strip()[-500:]}",
                f"check that {self._folder.parent} has about {self._config.scale:g} GB of free "
                "space",
            ) from None

    def _opened(self, tables: AbstractSet[str]) -> dict[str, _Table]:
        found = {name: _Table(self._folder / f"{name}.parquet", name) for name in tables}
        if "orders" in found and found["orders"].rows != self._orders:
            raise InvalidUsage(
                f"{TOOL} generated {found['orders'].rows} orders at scale {self._config.scale}, "
                f"expected {self._orders}: choose a scale with three digits"
            )
        return found


class _Table:
    """A file of the benchmark's data, with the types of `SCHEMAS`. Blocking."""

    def __init__(self, path: Path, name: str) -> None:
        self._shape = SCHEMAS[name].arrow()
        self._file = pq.ParquetFile(path)
        self.rows: int = self._file.metadata.num_rows
        # Decoded row groups, least recently used first.
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()

    def all(self) -> Iterator[pa.Table]:
        """Yield all rows, one row group at a time."""
        for number in range(self._file.num_row_groups):
            yield self._group(number)

    def between(self, column: str, first: int, last: int) -> pa.Table:
        """Return the rows whose `column` is between two values. The file must be sorted by it."""
        found = []
        place = self._shape.get_field_index(column)
        for number in range(self._file.num_row_groups):
            bounds = self._file.metadata.row_group(number).column(place).statistics
            if bounds.max < first or bounds.min > last:
                continue
            rows = self._group(number)
            keys = rows[column]
            found.append(
                rows.filter(
                    pc.and_(
                        pc.greater_equal(keys, pa.scalar(first, pa.int64())),
                        pc.less_equal(keys, pa.scalar(last, pa.int64())),
                    )
                )
            )
        return pa.concat_tables(found) if found else self._shape.empty_table()

    def _group(self, number: int) -> pa.Table:
        found = self._kept.pop(number, None)
        if found is None:
            found = self._file.read_row_group(number).select(self._shape.names).cast(self._shape)
        self._kept[number] = found
        while len(self._kept) > GROUPS_KEPT:
            self._kept.popitem(last=False)
        return found

"""TPC-H: all eight tables at a scale factor, then refresh functions, pair by pair.

Theory of operation. Orders are numbered in the order in which they come into being: the first are
those of the benchmark's own data, which `tpchgen-cli` writes as Parquet files into the scratch
folder; those after them are told by `tpch_orders`. So the orders that are there at any time are
those from one number to another: refresh function 1 adds to the end of that range, refresh
function 2 takes from its beginning, both with their lineitems. Even events are RF1, odd ones RF2,
each a transaction of its own; the number of orders after each pair is that of the beginning.

The rows of an order are the same whenever they are told, so what is deleted is exactly what was
inserted. As long as some first orders are there, their files are needed to delete them: they are
made again at each opening (the data are the same each time).
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from subprocess import CalledProcessError
from typing import Final

import anyio
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.errors import InvalidUsage
from actors.kernel import Clock
from actors.sources.draws import numbered
from actors.sources.generators import GeneratorConfig, at_least
from actors.sources.source import Export, Rows, Unreachable
from actors.sources.tpch_orders import SCHEMAS, NewOrders, order_keys, weighed

TOOL: Final = "tpchgen-cli"
ORDERS: Final = 1_500_000
"""At scale factor 1."""
REFRESH_ORDERS: Final = 1_500
"""Of each refresh function, at scale factor 1."""
ORDERS_AT_ONCE: Final = 10_000
"""Orders, with about four times as many lineitems, make a piece."""
GROUPS_KEPT: Final = 2
"""Row groups of a file that are kept decoded."""
SCALE_MAX: Final = 1_000.0
REFRESHED: Final = ("orders", "lineitem")
_KEYS: Final = {"orders": "o_orderkey", "lineitem": "l_orderkey"}


class TpchConfig(GeneratorConfig, frozen=True, kw_only=True, tag="tpch"):
    """An event is a refresh function."""

    scale: float = 0.01
    orders_per_refresh: int | None = None
    """None: as the benchmark has it, a thousandth of all orders."""

    def check(self) -> None:
        """See `GeneratorConfig.check`."""
        super().check()
        if not 0.001 <= self.scale <= SCALE_MAX:
            raise InvalidUsage(f"scale = {self.scale}: must be from 0.001 to {SCALE_MAX}")
        if self.orders_per_refresh is not None:
            at_least(self, orders_per_refresh=1)
            if self.orders_per_refresh > int(ORDERS * self.scale):
                raise InvalidUsage(
                    f"orders_per_refresh = {self.orders_per_refresh}: at scale {self.scale} there "
                    f"are {int(ORDERS * self.scale)} orders"
                )


class Tpch:
    """The series: event ``2 n`` inserts the n-th set of orders, ``2 n + 1`` deletes the oldest."""

    exports = tuple(Export(name, schema) for name, schema in SCHEMAS.items())
    turns = 1.0
    light = False

    def __init__(self, config: TpchConfig, clock: Clock, scratch: Path) -> None:
        self._config = config
        self._clock = clock
        self._folder = scratch / f"tpch-{uuid.uuid4().hex}"
        self._orders = int(ORDERS * config.scale)
        self._each = config.orders_per_refresh or max(1, int(REFRESH_ORDERS * config.scale))
        self._new = NewOrders(config.seed, config.scale, self._orders)
        self._tables: dict[str, _Table] = {}
        self.events_at_once = max(1, ORDERS_AT_ONCE // self._each // 2 * 2)

    async def prepare(self, at: int, wanted: AbstractSet[str]) -> None:
        """See `Series`: has the files made, as far as they will be needed."""
        tables = set(wanted)
        if self._range(at)[0] >= self._orders:
            tables -= set(REFRESHED)
        elif tables & set(REFRESHED):
            tables |= set(REFRESHED)
        if not tables:
            return
        await self._generate(tables)
        self._tables = await self._clock.run_blocking(lambda: self._opened(tables))

    def contents(self, at: int, wanted: AbstractSet[str]) -> Iterator[Rows]:
        """See `Series`."""
        for name in sorted(wanted - set(REFRESHED)):
            for rows in self._tables[name].all():
                yield Rows(name, weighed(rows, 1))
        yield from self._weighed(*self._range(at), 1, wanted)

    def changes(self, start: int, stop: int, wanted: AbstractSet[str]) -> Iterator[Rows]:
        """See `Series`."""
        for event in range(start, stop):
            first = event // 2 * self._each
            if event % 2 == 0:
                first += self._orders
            yield from self._weighed(first, first + self._each, 1 - event % 2 * 2, wanted)

    async def release(self) -> None:
        """See `Series`."""
        self._tables = {}
        with anyio.CancelScope(shield=True):
            folder = self._folder
            await self._clock.run_blocking(lambda: shutil.rmtree(folder, ignore_errors=True))

    # -- orders by number -------------------------------------------------------------------------

    def _range(self, at: int) -> tuple[int, int]:
        """The orders that are there after `at` events: from a number up to another."""
        return at // 2 * self._each, self._orders + (at + 1) // 2 * self._each

    def _weighed(
        self, start: int, stop: int, diff: int, wanted: AbstractSet[str]
    ) -> Iterator[Rows]:
        """Orders `start` to ``stop - 1`` with their lineitems, in pieces."""
        if not wanted & set(REFRESHED):
            return
        while start < stop:
            end = min(stop, start + ORDERS_AT_ONCE)
            if start < self._orders:
                end = min(end, self._orders)
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
                    yield Rows(name, weighed(rows[name], diff))
            start = end

    # -- the benchmark's own data -----------------------------------------------------------------

    async def _generate(self, tables: AbstractSet[str]) -> None:
        beside = Path(sys.executable).parent / TOOL
        tool = str(beside) if beside.is_file() else shutil.which(TOOL)
        if tool is None:
            raise InvalidUsage(
                f"TPC-H data are made by {TOOL}, which is not installed: "
                "pip install 'penstock-views[tpch]'"
            )
        folder = self._folder
        await self._clock.run_blocking(lambda: folder.mkdir(parents=True, exist_ok=True))
        names = ",".join(sorted(tables))
        command = [tool, "parquet", "-s", repr(self._config.scale), "--tables", names, "--quiet"]
        try:
            await anyio.run_process([*command, "--output-dir", str(self._folder)])
        except (CalledProcessError, OSError) as error:
            said = getattr(error, "stderr", b"") or str(error).encode()
            raise Unreachable(
                f"{TOOL} failed: {said.decode(errors='replace').strip()[-500:]}",
                f"it needs about {self._config.scale:g} GB in {self._folder.parent}",
            ) from None

    def _opened(self, tables: AbstractSet[str]) -> dict[str, _Table]:
        found = {name: _Table(self._folder / f"{name}.parquet", name) for name in tables}
        if "orders" in found and found["orders"].rows != self._orders:
            raise InvalidUsage(
                f"{TOOL} made {found['orders'].rows} orders at scale {self._config.scale}, "
                f"expected were {self._orders}: choose a scale with three digits"
            )
        return found


class _Table:
    """A file of the benchmark's data, in our types. Blocking."""

    def __init__(self, path: Path, name: str) -> None:
        self._shape = SCHEMAS[name].arrow()
        self._file = pq.ParquetFile(path)
        self.rows: int = self._file.metadata.num_rows
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()

    def all(self) -> Iterator[pa.Table]:
        """All rows, a row group at a time."""
        for number in range(self._file.num_row_groups):
            yield self._group(number)

    def between(self, column: str, first: int, last: int) -> pa.Table:
        """Rows by a key that they are sorted by, from one value to another."""
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

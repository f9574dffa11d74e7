"""Display of the demo's progress.

`DemoBoard` collects the state: the contents of the views as sums of their changes, their status,
and the position in the stream. `DemoBoard.picture` renders it for a terminal, and `DemoBoard.line`
as one line for a pipe or a file.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

import anyio
import pyarrow as pa
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from actors.model.plan.schema import DIFF, TIME
from actors.model.protocol.api import ObjectStatus
from actors.runtime.progress import EMPTY, Frontier
from penstock_flights.flights import EASTERN, FlightTransaction
from penstock_flights.play import DemoView

RATE_SECONDS: Final = 5.0
"""Window of the displayed rate of changes."""
WIDTH_MIN: Final = 80
WIDTH_MAX: Final = 100
ROWS_MAX: Final = {"delay_by_carrier": 12, "delay_by_weather": 4, "late_now": 6}

Cell: TypeAlias = Callable[[Mapping[str, Any]], str]


def _field(name: str) -> Cell:
    return lambda record: show(name, record[name])


SHOWN: Final[dict[str, tuple[tuple[str, int, Cell], ...]]] = {
    "delay_by_carrier": (
        ("carrier", 18, _field("carrier")),
        ("flights", 7, _field("flights")),
        ("delay", 5, _field("mean_delay")),
        ("cancel", 6, _field("share_cancelled")),
    ),
    "delay_by_weather": (
        ("weather", 7, _field("visibility")),
        ("flights", 7, _field("flights")),
        ("delay", 5, _field("mean_delay")),
        ("cancel", 6, _field("share_cancelled")),
    ),
    "late_now": (
        ("flight", 7, lambda record: f"{record['carrier']} {record['flight']}"),
        ("from", 4, _field("origin")),
        ("to", 13, _field("destination")),
        ("delay", 5, _field("dep_delay")),
    ),
}
"""Heading, width and cell function of each displayed column, by view."""
AT_WORK: Final = frozenset({"", "ready", "gathering", "running", "committing", "installing"})
"""Normal states of a view. The display shows the view's mode instead of these."""
WIDENED: Final = frozenset({"carrier", "to"})
"""Columns that get the spare width."""
TEXTS: Final = frozenset({"carrier", "weather", "flight", "from", "to"})


class ViewContents:
    """The rows of a view, as the sum of the changes from a subscribe."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[Any, ...]] = Counter()
        """Rows with their multiplicities."""
        self.schema: pa.Schema | None = None
        """Columns of the view; None before its first changes."""
        self.upper: Frontier = 0
        """All changes below this frontier are included."""
        self.changes = 0
        """Number of changes so far."""

    def apply(self, upper: Frontier, updates: pa.Table | None) -> None:
        """Add the changes below `upper`."""
        self.upper = upper
        if updates is None or updates.num_rows == 0:
            return
        self.schema = updates.drop_columns([TIME, DIFF]).schema
        columns = [updates[name].to_pylist() for name in self.schema.names]
        for row, diff in zip(zip(*columns, strict=True), updates[DIFF].to_pylist(), strict=True):
            self.changes += abs(diff)
            self.rows[row] += diff
            if self.rows[row] == 0:
                del self.rows[row]

    def records(self, order: str) -> list[dict[str, Any]]:
        """Return the rows as dicts, sorted by column `order`, largest first."""
        names = self.schema.names if self.schema is not None else []
        records = [dict(zip(names, row, strict=True)) for row in self.rows.elements()]
        return sorted(records, key=lambda record: -(record[order] or 0))

    def table(self) -> pa.Table | None:
        """Return the rows in the form of a read; None before the first changes."""
        if self.schema is None:
            return None
        return pa.Table.from_pylist(
            [dict(zip(self.schema.names, row, strict=True)) for row in self.rows.elements()],
            schema=self.schema,
        )


class DemoBoard:
    """The state of the display. The first transaction counts as written from the start."""

    def __init__(
        self, views: Sequence[DemoView], stream: Sequence[FlightTransaction], now: float
    ) -> None:
        self.views = views
        self.stream = stream
        self.started = now
        self.contents = {view.name: ViewContents() for view in views}
        """Contents of the views by name."""
        self.status: dict[str, ObjectStatus] = {}
        """Latest status of each view by name."""
        self.step_ms: dict[str, list[float]] = {view.name: [] for view in views}
        """Sampled durations of steps, by view."""
        self.lag_ms: list[int] = []
        """Sampled lags of all views."""
        self.played_at = self.caught_up_at = now
        """When the last transaction was written, and when all views included it."""
        self.moved = anyio.Event()
        """Set, and replaced, whenever a subscriber receives a batch."""
        self.done = 1
        """Number of written transactions."""
        self.changes = stream[0].changes
        """Number of written changes."""
        self.minute = stream[0].minute
        """Current minute of the stream."""
        self.note = ""
        """The latest note."""
        self._recent: deque[tuple[float, int]] = deque()
        """Times and numbers of changes of recent transactions."""

    def written(self, now: float, transaction: FlightTransaction) -> None:
        """Record that a transaction is durable."""
        self.done += 1
        self.changes += transaction.changes
        self.minute = transaction.minute
        self._recent.append((now, transaction.changes))
        if transaction.note:
            self.note = f"{clock(transaction.minute)}: {transaction.note}"

    def follow(self, name: str, upper: Frontier, updates: pa.Table | None) -> None:
        """Add changes that the subscriber of a view received, up to the frontier `upper`."""
        self.contents[name].apply(upper, updates)
        self.moved.set()
        self.moved = anyio.Event()

    def followed(self) -> Frontier:
        """Return the frontier below which all subscribers have all changes."""
        return min(contents.upper for contents in self.contents.values())

    def report(self, objects: Sequence[ObjectStatus]) -> None:
        """Record the status of views. Durations and lags are sampled when the number of steps
        grows."""
        for found in objects:
            if found.name not in self.contents:
                continue
            before = self.status.get(found.name)
            if found.steps > (before.steps if before else 0):
                self.step_ms[found.name].append(found.step_ms)
                self.lag_ms.append(found.lag_ms)
            self.status[found.name] = found

    def rate(self, now: float) -> float:
        """Return the changes per second within the last `RATE_SECONDS`."""
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
        # Shortly after the start, the window is shorter.
        spent = min(RATE_SECONDS, max(0.1, now - self.started))
        return sum(changes for _, changes in self._recent) / spent

    # -- drawing -----------------------------------------------------------------------------------

    def line(self, now: float) -> str:
        """Format the state as one line."""
        parts = [
            f"{now - self.started:4.0f} s  {clock(self.minute)}",
            f"{self.done}/{len(self.stream)} transactions",
            f"{self.changes:,} changes, {self.rate(now):,.0f}/s",
        ]
        for view in self.views:
            found = self.status.get(view.name)
            if found is not None:
                parts.append(
                    f"{view.name}: {len(self.contents[view.name].rows)} rows, "
                    f"lag {found.lag_ms} ms, step {found.step_ms:.0f} ms"
                )
        return " | ".join(parts)

    def picture(self, now: float, columns: int = WIDTH_MIN) -> RenderableType:
        """Render the state for a terminal with this number of columns."""
        width = max(WIDTH_MIN, min(WIDTH_MAX, columns))
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(clock(self.minute), style="bold"),
            f"{self.changes:,} changes",
            f"{self.rate(now):,.0f}/s",
            ProgressBar(total=len(self.stream), completed=self.done, width=16),
            f"{self.done}/{len(self.stream)}",
        )
        carrier, *others = (self._rows(view, (width - WIDTH_MIN) // 2) for view in self.views)
        body = Table.grid(padding=(0, 2))
        body.add_row(carrier, Group(*others))
        note = Text(self.note, style="italic")
        return Panel(
            Group(head, Text(), body, self._frontiers(), note),
            title="Penstock: flights from New York, live",
            width=width,
        )

    def _rows(self, view: DemoView, spare: int) -> RenderableType:
        contents = self.contents[view.name]
        records = contents.records(view.order) if contents.rows else []
        title = Text(f"{view.title} ({len(records)})", style="bold")
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
        for heading, width, _ in SHOWN[view.name]:
            table.add_column(
                heading,
                justify="left" if heading in TEXTS else "right",
                no_wrap=True,
                width=width + (spare if heading in WIDENED else 0),
            )
        limit = ROWS_MAX[view.name]
        for record in records[:limit]:
            table.add_row(*(cell(record) for _, _, cell in SHOWN[view.name]))
        # Empty rows keep the height constant.
        for _ in range(limit - len(records)):
            table.add_row()
        return Group(title, table)

    def _frontiers(self) -> RenderableType:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
        for name in ("view", "how", "frontier", "lag", "steps", "step", "Spark"):
            table.add_column(name, justify="left" if name in ("view", "how") else "right")
        for view in self.views:
            found = self.status.get(view.name)
            if found is None:
                table.add_row(view.name, "creating")
                continue
            table.add_row(
                view.name,
                found.mode if found.state in AT_WORK else found.state,
                moment(found.upper),
                f"{found.lag_ms} ms",
                str(found.steps),
                f"{found.step_ms:.0f} ms",
                f"{found.spark_ms:.0f} ms",
            )
        return table


def clock(minute: int) -> str:
    """Format a minute of the stream in Eastern Standard Time."""
    when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(minutes=minute - EASTERN)
    return f"{when:%a %d %b %Y %H:%M}"


def moment(frontier: Frontier) -> str:
    """Format a frontier as a time of day in UTC."""
    if frontier >= EMPTY:
        return "[]"
    when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=frontier)
    return f"{when:%H:%M:%S}.{frontier % 1000:03d}"


def show(name: str, value: Any) -> str:
    """Format a value for the display."""
    if value is None:
        return "-"
    if name == "share_cancelled":
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:.1f}"
    return f"{value:,}" if name == "flights" else str(value)


def percentiles(values: Sequence[float]) -> Mapping[str, float]:
    """Return the median and the 95th percentile."""
    ordered = sorted(values)
    if not ordered:
        return {"median": 0.0, "p95": 0.0}
    return {
        "median": ordered[len(ordered) // 2],
        "p95": ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)],
    }

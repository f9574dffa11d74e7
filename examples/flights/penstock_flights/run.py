"""The complete demo: a service, a stream, three views, a display and a proof.

The service runs in this process. Everything is created and written in SQL over the PostgreSQL
protocol, with statements that are printed. The display and the proof use the Python client.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
from rich.console import Console
from rich.live import Live

from actors.doors.client.client import Client, concatenate_pieces
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import SystemClock
from actors.runtime.progress import Time
from actors.runtime.settings import Settings, load
from actors.service import Service
from penstock_flights import flights, play, proof
from penstock_flights import statements as texts
from penstock_flights.door import DoorConnection
from penstock_flights.feeds import DemoFeed, FromPostgres, SqlFeed, from_postgres
from penstock_flights.picture import DemoBoard, percentiles
from penstock_flights.play import VIEWS
from penstock_flights.script import DemoScript

DAY_MS: Final = 86_400_000
FRAME_SECONDS: Final = 0.25
STATUS_SECONDS: Final = 0.2
LINE_SECONDS: Final = 5.0
HOURS_SHOWN: Final = 12
"""The number of transactions whose changes are shown at the end."""
CATCH_UP_MS: Final = 120_000
CLOCK: Final = SystemClock()
SOURCES: Final = ("client", "postgres")


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `penstock demo`."""

    start: date = date(2013, 2, 1)
    days: int = 25
    tick_minutes: int = 60
    speed: float | None = 8.0
    """Transactions per second; None: as fast as possible."""
    workers: int = 2
    state_dir: Path | None = None
    """State directory, which remains afterwards; None: a temporary one."""
    plain: bool = False
    """Print lines instead of drawing on the terminal."""
    proof_times: int = 3
    """The number of timestamps at which to compare the views; 0: no proof."""
    source: str = "client"
    """One of `SOURCES`."""


async def run(options: DemoOptions, console: Console) -> int:
    """Run the demo. Return the exit status: 0, or 1 if a view differs from plain Spark's result.

    Raises errors of `actors.runtime.errors`, such as for missing data, a state directory that is in
    use, or missing Java.
    """
    source = await anyio.to_thread.run_sync(flights.read)
    stream = flights.history(source, options.start, options.days, options.tick_minutes)
    console.print(
        f"{sum(t.changes for t in stream):,} changes of {options.days} days from "
        f"{options.start}, in {len(stream)} transactions"
    )
    async with contextlib.AsyncExitStack() as stack:
        feed = await _feed(options.source, console, stack)
        directory = stack.enter_context(_directory(options.state_dir))
        settings = load(
            flags={
                "state_dir": str(directory / "state"),
                "listen": "127.0.0.1:0",
                "pg_listen": "127.0.0.1:0",
                "workers": options.workers,
                # The proof reads the views AS OF timestamps of the whole run.
                "retain_history_ms": DAY_MS,
            }
        )
        began = _seconds()
        console.print("starting the service and its Spark …")
        service, client = await stack.enter_async_context(_service(settings))
        script = await _script(service, console, stack)
        if isinstance(feed, FromPostgres):
            await stack.enter_async_context(feed.running())
        await _set_up(script, client, feed, stream[0])
        console.print(f"the three views were ready after {_seconds() - began:.1f} s")
        if isinstance(feed, SqlFeed):
            _show_first(script, console, stream)
        board = await _stream(client, stream, options, console, feed)
        _summary(console, board, feed.log)
        await _read(script, console, feed.log)
        if options.proof_times == 0:
            return 0
        return await _prove(client, feed, options, console, board)


async def _feed(source: str, console: Console, stack: contextlib.AsyncExitStack) -> DemoFeed:
    """Open the feed of the flights. The stack closes it. Raises `InvalidUsage`."""
    if source not in SOURCES:
        raise InvalidUsage(f"invalid source {source!r}: expected {' or '.join(SOURCES)}")
    if source == "client":
        return SqlFeed()
    console.print("starting a PostgreSQL server for the demo …")
    return await stack.enter_async_context(from_postgres())


def _seconds() -> float:
    return CLOCK.monotonic_ms() / 1000


@contextlib.contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as made:
        yield Path(made)


@contextlib.asynccontextmanager
async def _service(settings: Settings) -> AsyncIterator[tuple[Service, Client]]:
    """Run a service and a client while the block runs. If the service fails, the block is
    canceled."""
    async with (
        Service(settings) as service,
        anyio.create_task_group() as group,
        await Client.in_process(service) as client,
    ):
        group.start_soon(_end_with, service, group.cancel_scope)
        yield service, client
        group.cancel_scope.cancel()


async def _end_with(service: Service, scope: anyio.CancelScope) -> None:
    await service.wait_stopped()
    scope.cancel()


async def _set_up(
    script: DemoScript, client: Client, feed: DemoFeed, opening: flights.FlightTransaction
) -> None:
    present = {found.name for found in (await client.status()).objects}
    if present:
        raise InvalidUsage(
            f"the state directory already contains {', '.join(sorted(present))}: "
            "the demo requires an empty one"
        )
    await feed.begin(script, client, opening)
    for view in VIEWS:
        await script.run(texts.create_view(view))
    await _wait(client, feed.log.times[-1])


async def _script(
    service: Service, console: Console, stack: contextlib.AsyncExitStack
) -> DemoScript:
    """Open the demo's SQL session at the service. The stack closes it."""
    door = await DoorConnection.connect(service.pg_address)
    stack.push_async_callback(door.aclose)
    host, _, port = service.pg_address.rpartition(":")
    console.print(f"the following statements are sent as SQL; to join: psql -h {host} -p {port}")
    return DemoScript(door, console)


def _show_first(
    script: DemoScript, console: Console, stream: Sequence[flights.FlightTransaction]
) -> None:
    """Print the first transaction that updates flights."""
    updated = [each for each in stream[1:] if any(d.update is not None for d in each.deltas)]
    console.print(f"\neach of {len(stream) - 1} transactions has one tick of flights, for example:")
    for statement in texts.transaction_statements((updated or stream[1:])[0]):
        script.show(statement)


async def _read(script: DemoScript, console: Console, log: play.ChangeLog) -> None:
    """Read a view, and subscribe to the last changes of a query that is not a view."""
    console.print()
    await script.run(texts.READ_CARRIERS)
    since = log.times[-min(len(log.times), HOURS_SHOWN)]
    await script.run(texts.follow_delayed(since, log.times[-1] + 1), rows_shown=6)


async def _wait(client: Client, time: Time) -> None:
    for view in VIEWS:
        await client.wait_for(view.name, time, deadline_ms=CATCH_UP_MS)


async def _stream(
    client: Client,
    stream: Sequence[flights.FlightTransaction],
    options: DemoOptions,
    console: Console,
    feed: DemoFeed,
) -> DemoBoard:
    """Write the stream after its first transaction, and wait until all views are complete."""
    board, log = DemoBoard(VIEWS, stream, _seconds()), feed.log
    async with anyio.create_task_group() as group:
        for view in VIEWS:
            group.start_soon(_follow, client, view.name, board)
        group.start_soon(_watch, client, board)
        live = console.is_terminal and not options.plain
        group.start_soon(_show, console, board, live)
        await feed.play(stream[1:], options.speed, lambda done: board.written(_seconds(), done))
        board.played_at = _seconds()
        await feed.settle()
        await _wait(client, log.times[-1])
        board.caught_up_at = _seconds()
        while board.followed() <= log.times[-1]:
            await board.moved.wait()
        # A last time, so that the summary includes the last steps.
        board.report((await client.status()).objects)
        group.cancel_scope.cancel()
    return board


async def _follow(client: Client, name: str, board: DemoBoard) -> None:
    async for change in concatenate_pieces(client.subscribe(name)):
        board.follow(name, change.upper, change.table)


async def _watch(client: Client, board: DemoBoard) -> None:
    while True:
        board.report((await client.status()).objects)
        await anyio.sleep(STATUS_SECONDS)


async def _show(console: Console, board: DemoBoard, live: bool) -> None:
    if not live:
        while True:
            await anyio.sleep(LINE_SECONDS)
            console.print(board.line(_seconds()), soft_wrap=True)
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as picture:
        try:
            while True:
                picture.update(board.picture(_seconds(), console.width), refresh=True)
                await anyio.sleep(FRAME_SECONDS)
        # The last picture remains on the screen.
        finally:
            picture.update(board.picture(_seconds(), console.width), refresh=True)


def _summary(console: Console, board: DemoBoard, log: play.ChangeLog) -> None:
    spent = max(board.played_at - board.started, 0.001)
    steps = [ms for found in board.step_ms.values() for ms in found]
    step, lag = percentiles(steps), percentiles(board.lag_ms)
    streamed = log.changes - sum(delta.changes for delta in log.entries[0].deltas)
    count = sum(board.status[view.name].steps for view in VIEWS)
    say = functools.partial(console.print, soft_wrap=True)
    say(
        f"\n{log.changes:,} changes at {len(log.entries)} times in {spent:.1f} s "
        f"({streamed / spent:,.0f} changes/s); all views were up to date "
        f"{board.caught_up_at - board.played_at:.2f} s after the last"
    )
    say(
        f"{count} steps: median {step['median']:.0f} ms, 95% within {step['p95']:.0f} ms; "
        f"lag of the views: median {lag['median']:.0f} ms, 95% within {lag['p95']:.0f} ms"
    )


async def _prove(
    client: Client, feed: DemoFeed, options: DemoOptions, console: Console, board: DemoBoard
) -> int:
    log = feed.log
    times = proof.choose_times(log, options.proof_times)
    console.print(
        f"\nProof: compare each view AS OF {len(times)} times with plain Spark's result of the "
        "same query over the input tables as of that time",
        soft_wrap=True,
    )

    def report(comparison: proof.ViewComparison) -> None:
        number = log.transactions(comparison.time)
        console.print(
            f"  {'equal' if not comparison.differences else 'WRONG'}  {comparison.view:<16} "
            f"after transaction {number:>4}  {comparison.rows:>3} rows"
        )
        for line in comparison.differences:
            console.print(f"         {line}", markup=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="penstock-proof-") as scratch:
        made = await proof.prove(client, log, VIEWS, times, Path(scratch), report)
    wrong = sum(1 for comparison in made if comparison.differences)
    unlike = await _subscribers(client, log.times[-1], board, console)
    outside = await _outside(client, feed, console)
    if wrong or unlike or outside:
        console.print(
            f"{wrong + outside} comparisons and {unlike} subscribers are WRONG", soft_wrap=True
        )
        return 1
    console.print(f"all {len(made)} comparisons are equal, and so is each subscriber's own sum")
    return 0


async def _subscribers(client: Client, time: Time, board: DemoBoard, console: Console) -> int:
    """Count the subscribers whose sum of changes differs from the view."""
    wrong = 0
    for view in VIEWS:
        found = board.contents[view.name].table()
        right = await client.peek(view.name, as_of=time)
        lines = proof.differences(right, found) if found is not None else []
        for line in lines:
            console.print(f"  subscriber of {view.name}: {line}", markup=False, soft_wrap=True)
        wrong += bool(lines)
    return wrong


async def _outside(client: Client, feed: DemoFeed, console: Console) -> int:
    """Count the views whose final contents differ from the external database's result."""
    wrong = 0
    for view in VIEWS:
        found = await client.peek(view.name, as_of=feed.log.times[-1])
        right = await feed.answer(view, found.schema)
        if right is None:
            continue
        lines = proof.differences(right, found)
        console.print(
            f"  {'WRONG' if lines else 'equal'}  {view.name:<16} compared with {feed.name} "
            f"{right.num_rows:>4} rows"
        )
        for line in lines:
            console.print(f"         {line}", markup=False, soft_wrap=True)
        wrong += bool(lines)
    return wrong


def console_of(plain: bool) -> Console:
    """Return the console for the demo's output."""
    return Console(file=sys.stdout, force_terminal=False if plain else None, highlight=False)

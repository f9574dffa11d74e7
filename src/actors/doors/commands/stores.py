"""Options and progress display of commands that work on the stores directly, with or without a
running service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from actors.doors.commands.console import (
    command_with_options,
    parse_settings,
    run_loop,
    set_up_logging,
)
from actors.runtime.settings import Settings, load

if TYPE_CHECKING:
    from actors.durable.persist.attach import AttachedClient, StoreLocation
    from actors.runtime.kernel import ActorClock

R = TypeVar("R")


class CommandStores(msgspec.Struct, frozen=True):
    """The stores that a command works on, with their settings."""

    place: Any
    settings: Settings


def _stores(
    state_dir: Annotated[
        str | None, typer.Option("--state-dir", help="State directory of the service.")
    ] = None,
    blob_url: Annotated[
        str | None,
        typer.Option(
            "--blob-url", help="Blob store, e.g. s3://bucket/path. Needs --consensus-url."
        ),
    ] = None,
    consensus_url: Annotated[
        str | None,
        typer.Option("--consensus-url", help="Consensus store, e.g. postgresql://…"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of the service's settings.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, as name=value. May be repeated."),
    ] = None,
) -> CommandStores:
    from actors.durable.persist.attach import store_location

    chosen = load(config, flags=parse_settings(settings or []))
    if (state_dir, blob_url, consensus_url) == (None, None, None):
        state_dir = chosen.state_dir
    # Use the stores of a service with these settings; the options alone would miss its URLs.
    blob_url = blob_url or chosen.blob_url or None
    consensus_url = consensus_url or chosen.consensus_url or None
    set_up_logging("warning")
    return CommandStores(store_location(state_dir, blob_url, consensus_url), chosen)


stands_on_stores = command_with_options("stores", _stores)


def with_stores(
    stores: CommandStores,
    call: Callable[[AttachedClient, ActorClock], Awaitable[R]],
    opened: Callable[
        [StoreLocation, Settings, ActorClock], AbstractAsyncContextManager[AttachedClient]
    ]
    | None = None,
) -> R:
    """Open the stores, await `call` with them, and return the result.

    `opened` opens them; by default they are opened as a guest.
    """

    async def run() -> R:
        from actors.durable.persist.attach import open_as_guest
        from actors.runtime.kernel import SystemClock

        clock = SystemClock()
        async with (opened or open_as_guest)(stores.place, stores.settings, clock) as attached:
            return await call(attached, clock)

    return run_loop(run)


@contextmanager
def show_progress(what: str, *, as_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr if that is a terminal.

    Yield a function that updates it, which takes the amount done and the total.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    amount = DownloadColumn() if as_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)

"""The command line of the simulators."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tests.simulators import campaign as simulation

STATUS_WRONG: Final = 1
app = typer.Typer()


@app.command()
def simulate(
    runs: Annotated[int | None, typer.Option("--runs", min=1, help="How many seeds.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="The first seed; alone: replays that run, twice.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Show every step of a replay.")] = False,
    sources: Annotated[
        bool, typer.Option("--sources", help="Only seeds whose runs have sources and sinks.")
    ] = False,
    persist: Annotated[
        bool, typer.Option("--persist", help="Shards alone: a few processes on the same stores.")
    ] = False,
    halves: Annotated[
        bool, typer.Option("--halves", help="Workers alone: both halves, and their clients.")
    ] = False,
    wal: Annotated[
        bool, typer.Option("--wal", help="The WAL alone: acceptors, and proposers that race.")
    ] = False,
    wal_files: Annotated[
        bool, typer.Option("--wal-files", help="The same, with logs in files that lose bytes.")
    ] = False,
) -> None:
    """Simulates the whole service under faults drawn from seeds; exit status 1 on a failure.

    A failure is shown with its seed and a shrunk schedule.
    """
    if persist + sources + halves + wal + wal_files > 1:
        raise typer.BadParameter(
            "give one of --sources, --persist, --halves, --wal and --wal-files"
        )
    kind = simulation.SERVICE
    for wanted, of_it in (
        (persist, simulation.SHARDS),
        (halves, simulation.HALVES),
        (wal, simulation.WAL),
        (wal_files, simulation.WAL_FILES),
    ):
        kind = of_it if wanted else kind
    if runs is None and seed is not None:
        wrong = simulation.replay_and_print(seed, as_json=as_json, trace=trace, kind=kind)
    else:
        wrong = simulation.run_and_print_campaign(
            runs or 100, seed or 0, as_json=as_json, sources=sources, kind=kind
        )
    if wrong:
        raise typer.Exit(STATUS_WRONG)


if __name__ == "__main__":
    app()

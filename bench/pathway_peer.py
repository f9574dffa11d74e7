"""Pathway's side of `others`, run by it with the interpreter of an environment of its own.

Pathway needs an older Arrow than the service, so neither can be imported beside the other.

    python pathway_peer.py FOLDER

reads ``items.arrow`` and ``batches.arrow`` (one batch of updated rows each) of the folder, and
writes ``changes.jsonl``, the view's changes, and ``taken.json``: milliseconds of each batch, from
its rows being handed over until its changes are written and fsynced; and the last answer.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pathway as pw
import pyarrow as pa

SECONDS_MAX = 300
"""A batch must be durable by then."""


class Item(pw.Schema):  # type: ignore[misc]
    """A row; another of the same id replaces it."""

    id: int = pw.column_definition(primary_key=True)
    k: int
    v: int


class Output:
    """The view's changes, written durably at the end of each time."""

    def __init__(self, file: Path) -> None:
        self.groups: dict[int, tuple[int, int]] = {}
        self.written = 0
        self._file = file.open("w")
        self._pending: list[dict[str, int]] = []
        self._durable = threading.Condition()

    def change(self, key: Any, row: dict[str, int], time: int, is_addition: bool) -> None:
        """Takes in one change."""
        self._pending.append({**row, "time": time, "diff": 1 if is_addition else -1})

    def end(self, time: int) -> None:
        """Makes the changes of a time durable."""
        if not self._pending:
            return
        self._file.writelines(json.dumps(change) + "\n" for change in self._pending)
        self._file.flush()
        os.fsync(self._file.fileno())
        with self._durable:
            for change in self._pending:
                # No group becomes empty: a retraction has its insertion at the same time.
                if change["diff"] > 0:
                    self.groups[change["k"]] = (change["n"], change["s"])
            self.written += len(self._pending)
            self._pending.clear()
            self._durable.notify_all()

    def wait_rows(self, rows: int) -> None:
        """Until the groups of so many rows are durable."""
        self._wait(
            lambda: sum(n for n, _ in self.groups.values()) >= rows, f"the groups of {rows} rows"
        )

    def wait_lines(self, lines: int) -> None:
        """Until so many changes are durable."""
        self._wait(lambda: self.written >= lines, f"{lines} changes")

    def _wait(self, condition: Callable[[], bool], wanted: str) -> None:
        with self._durable:
            if not self._durable.wait_for(condition, SECONDS_MAX):
                raise TimeoutError(
                    f"{self.written} changes after {SECONDS_MAX} s, wanted: {wanted}"
                )


class Items(pw.io.python.ConnectorSubject):  # type: ignore[misc]
    """All rows at once, then batch after batch, each when the one before is durable."""

    def __init__(self, folder: Path, output: Output) -> None:
        super().__init__(session_type="upsert")
        self._folder = folder
        self._output = output
        self.times: list[float] = []

    def run(self) -> None:
        """Called by Pathway in a thread of its own."""
        rows = self._hand_over(pa.ipc.open_file(self._folder / "items.arrow").read_all())
        self._output.wait_rows(rows)
        wanted = self._output.written
        batches = pa.ipc.open_file(self._folder / "batches.arrow")
        for number in range(batches.num_record_batches):
            batch = batches.get_batch(number)
            # Each row is of another group: one change back, one forth.
            wanted += 2 * batch.num_rows
            started = time.perf_counter()
            self._hand_over(batch)
            self._output.wait_lines(wanted)
            self.times.append((time.perf_counter() - started) * 1000)
            assert self._output.written == wanted, (self._output.written, wanted)

    def _hand_over(self, rows: pa.Table | pa.RecordBatch) -> int:
        columns = [rows[name].to_pylist() for name in ("id", "k", "v")]
        for id_, k, v in zip(*columns, strict=True):
            self.next(id=id_, k=k, v=v)
        self.commit()
        return int(rows.num_rows)


def main() -> None:
    """Runs until all batches are through."""
    folder = Path(sys.argv[1])
    output = Output(folder / "changes.jsonl")
    subject = Items(folder, output)
    rows = pw.io.python.read(subject, schema=Item, autocommit_duration_ms=None)
    view = rows.groupby(rows.k).reduce(rows.k, n=pw.reducers.count(), s=pw.reducers.sum(rows.v))
    pw.io.subscribe(view, on_change=output.change, on_time_end=output.end)
    pw.run(monitoring_level=pw.MonitoringLevel.NONE)
    groups = [(k, n, s) for k, (n, s) in output.groups.items()]
    (folder / "taken.json").write_text(json.dumps({"times": subject.times, "groups": groups}))


if __name__ == "__main__":
    main()

"""Pathway's side of `others`, which runs it with the interpreter of another environment.

Pathway needs an older Arrow than the service, so the two cannot be imported together.

    python pathway_peer.py FOLDER

reads ``items.arrow`` and ``batches.arrow`` (each a batch of updated rows) from the folder. It
writes ``changes.jsonl``, the view's changes, and ``taken.json``: the milliseconds of each batch,
from passing its rows until its changes are written and fsynced, and the final result.
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
"""Deadline for a batch to be durable."""


class Item(pw.Schema):  # type: ignore[misc]
    """A row. It replaces an earlier row with the same id."""

    id: int = pw.column_definition(primary_key=True)
    k: int
    v: int


class Output:
    """Writes the view's changes durably at the end of each time."""

    def __init__(self, file: Path) -> None:
        self.groups: dict[int, tuple[int, int]] = {}
        self.written = 0
        self._file = file.open("w")
        self._pending: list[dict[str, int]] = []
        self._durable = threading.Condition()

    def change(self, key: Any, row: dict[str, int], time: int, is_addition: bool) -> None:
        """Record one change."""
        self._pending.append({**row, "time": time, "diff": 1 if is_addition else -1})

    def end(self, time: int) -> None:
        """Make the changes of a time durable."""
        if not self._pending:
            return
        self._file.writelines(json.dumps(change) + "\n" for change in self._pending)
        self._file.flush()
        os.fsync(self._file.fileno())
        with self._durable:
            for change in self._pending:
                # No group becomes empty, since each retraction has an insertion at the same time.
                if change["diff"] > 0:
                    self.groups[change["k"]] = (change["n"], change["s"])
            self.written += len(self._pending)
            self._pending.clear()
            self._durable.notify_all()

    def wait_rows(self, rows: int) -> None:
        """Wait until the groups of `rows` rows are durable."""
        self._wait(
            lambda: sum(n for n, _ in self.groups.values()) >= rows, f"the groups of {rows} rows"
        )

    def wait_lines(self, lines: int) -> None:
        """Wait until `lines` changes are durable."""
        self._wait(lambda: self.written >= lines, f"{lines} changes")

    def _wait(self, condition: Callable[[], bool], wanted: str) -> None:
        with self._durable:
            if not self._durable.wait_for(condition, SECONDS_MAX):
                raise TimeoutError(
                    f"{self.written} changes after {SECONDS_MAX} s, wanted: {wanted}"
                )


class Items(pw.io.python.ConnectorSubject):  # type: ignore[misc]
    """Emits all rows at once, then each batch when the previous one is durable."""

    def __init__(self, folder: Path, output: Output) -> None:
        super().__init__(session_type="upsert")
        self._folder = folder
        self._output = output
        self.times: list[float] = []

    def run(self) -> None:
        """Emit the rows. Pathway calls this in its own thread."""
        rows = self._hand_over(pa.ipc.open_file(self._folder / "items.arrow").read_all())
        self._output.wait_rows(rows)
        wanted = self._output.written
        batches = pa.ipc.open_file(self._folder / "batches.arrow")
        for number in range(batches.num_record_batches):
            batch = batches.get_batch(number)
            # Each row is in another group: one retraction and one insertion.
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
    """Run until all batches are done."""
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

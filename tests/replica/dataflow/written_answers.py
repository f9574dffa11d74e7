"""An engine whose executors write some of its answers beside the blobs, as Spark's do."""

from __future__ import annotations

import io
import random
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.durable.persist.memory_stores import MemoryBlob
from actors.model.plan.delta import TO, DeltaColumns
from actors.model.plan.jobs import (
    Answer,
    BucketFolder,
    ComputeDifference,
    Job,
    ObjectDone,
    RowsDone,
    RunStep,
)
from actors.model.plan.schema import DIFF, TIME
from actors.model.plan.updates import from_ipc
from actors.testing.engine import InMemoryExecutor


class WritableBlob(MemoryBlob):
    """A store in which others may write below reserved prefixes, and read nothing."""

    def place(self, key: str) -> tuple[str, str] | None:  # type: ignore[override]
        return ("memory://test", key) if key.endswith("-") else None

    def put(self, key: str, data: bytes) -> None:
        """Store what an executor wrote."""
        self._objects[key] = (data, self._clock.now_ms())


class WritingExecutor(InMemoryExecutor):
    """Writes of the answers that may be written a share, in up to two objects for each delta."""

    def __init__(self, blob: WritableBlob, seed: int, share: float) -> None:
        super().__init__()
        self.blob, self.dice, self.share = blob, random.Random(seed), share
        self.written = 0

    def answer(self, job: Job) -> Answer:
        answer = super().answer(job)
        if not isinstance(job, RunStep | ComputeDifference) or not job.into_bucket:
            return answer
        assert isinstance(answer, RowsDone)
        assert answer.arrow is not None
        rows = from_ipc(answer.arrow)
        if not rows.num_rows or self.dice.random() >= self.share:
            return answer
        folders = list(job.into_bucket)
        if isinstance(job, RunStep):
            plan = self._plans[job.dataflow]
            deltas = [*plan.deltas]
            if job.optimistic and not job.at_once:
                folders.append(folders[0])
                deltas.append(DeltaColumns(deltas[0].names, deltas[0].schema, plan.seldom_bit))
        else:
            deltas = [DeltaColumns(job.output.names, job.output, 0)]
        objects: list[ObjectDone] = []
        for number, (folder, delta) in enumerate(zip(folders, deltas, strict=True)):
            mine = rows
            if delta.bit:
                bit = pa.scalar(delta.bit, rows[TO].type)
                mine = rows.filter(pc.not_equal(pc.bit_wise_and(rows[TO], bit), 0))
            mine = mine.select([*delta.names, TIME, DIFF]).rename_columns(
                [*delta.schema.names, TIME, DIFF]
            )
            cut = self.dice.randint(0, mine.num_rows)
            for piece in (mine.slice(0, cut), mine.slice(cut)):
                if piece.num_rows:
                    name = f"{self.dice.getrandbits(64):x}.parquet"
                    objects.append(self._write(folder, name, piece, number))
        self.written += 1
        return RowsDone(job.job_id, rows.num_rows, objects=tuple(objects))

    def _write(self, folder: BucketFolder, name: str, rows: pa.Table, delta: int) -> ObjectDone:
        sink, footer = io.BytesIO(), io.BytesIO()
        pq.write_table(rows, sink)
        pq.read_metadata(sink).write_metadata_file(footer)
        data = sink.getvalue()
        self.blob.put(folder.prefix + name, data)
        times: dict[str, Any] = pc.min_max(rows[TIME]).as_py()
        return ObjectDone(
            name, rows.num_rows, len(data), zlib.crc32(data), footer.getvalue(), delta,
            times["min"], times["max"],
        )  # fmt: skip

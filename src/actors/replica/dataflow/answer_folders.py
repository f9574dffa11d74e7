"""Folders of a bucket into which executors write a job's answer, one for each shard of the view.

Theory of operation. Folders are reserved before the job is sent, and their places are sent with it.
If the answer is small, its rows come back as usual. If it is large, only the names of objects come
back. These are adopted as parts, which the append of the step names. Objects that are not adopted
become orphans when the reservation ends. If the blobs are not in a bucket, there are no folders and
every answer comes back as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import pyarrow as pa

from actors.durable.persist import BatchPart, PersistClient
from actors.model.plan.jobs import BucketFolder, ObjectDone
from actors.model.plan.updates import concat, consolidate
from actors.model.protocol.compute import ViewExport
from actors.replica.dataflow.commit import shards_of
from actors.runtime.errors import LocalProtocolError


class AnswerFolders:
    """Folders for the answer of one job of a view, reserved while the context is open."""

    def __init__(self, persist: PersistClient, export: ViewExport, *, wanted: bool = True) -> None:
        """Reserve a folder for the output and one for each hidden state, unless `wanted` is
        false."""
        self._persist = persist
        self._export = export
        self._shards = shards_of(export)
        reserved = [persist.reserve_folder(shard) for shard in self._shards if wanted]
        self._reserved = [each for each in reserved if each is not None]
        """(prefix, *place) of each reserved folder, until the context ends."""
        self.places = tuple(BucketFolder(*place) for _, *place in self._reserved)
        """The folder in which executors may write; empty if the blobs are not in a bucket."""

    def __enter__(self) -> AnswerFolders:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Adopted objects are pending parts by now, so they are kept.
        for prefix, *_ in self._reserved:
            self._persist.release_folder(prefix)

    async def adopt(self, objects: Sequence[ObjectDone]) -> list[list[BatchPart]]:
        """Return the objects as parts of each shard, which must then be appended or discarded.

        Raise `InvalidUsage` and `StorageError`; no part is left then.
        """
        parts: list[list[BatchPart]] = [[] for _ in self._shards]
        # Fail rather than lose the rows of objects that cannot be located.
        if objects and not self._reserved:
            raise LocalProtocolError("a job was answered with objects that were not requested")
        try:
            for number, (prefix, *_) in enumerate(self._reserved):
                mine = [each for each in objects if each.delta == number]
                if mine:
                    shard = self._shards[number]
                    parts[number] += await self._persist.adopt_written(shard, prefix, mine)
        except BaseException:
            # Parts of the deltas before are pending, and would stay so until the process ends.
            await self._persist.discard_parts([part for each in parts for part in each])
            raise
        return parts

    async def hidden_rows(self, parts: Sequence[Sequence[BatchPart]]) -> tuple[pa.Table, ...]:
        """Return the rows that the adopted parts contain for each hidden state, consolidated.

        Raise `StorageError`; no part is left then.
        """
        plan = self._export.plan
        found = []
        try:
            for state, mine in zip(plan.hidden, parts[1:], strict=True):
                shape = state.schema.arrow_updates()
                # Steps look up hidden states in memory, so their changes are needed here as well.
                tables = [await self._persist.fetch(part, state.schema) for part in mine]
                plain = [table.select(shape.names).cast(shape) for table in tables]
                found.append(consolidate(concat(plain, shape)))
        except BaseException:
            await self._persist.discard_parts([part for each in parts for part in each])
            raise
        return tuple(found)

"""Renderings of the storage half: the part of a worker's state that follows from sequenced
commands.

Theory of operation. Internal commands arrive in one order for both halves, which is the same on
every worker. `RenderingSet` depends on these commands alone, not on the client, progress or time.
All workers therefore have the same renderings, with the same numbers and the same *render log*. The
owner of an object, a worker chosen by the object's id, acts on each change (`Change`).

Rules:
- A command that renders an object gives it the next number and ends its previous rendering.
- `SuspendAndRestart` ends only the rendering that it names, never a later one.
- `DropObjects` ends current renderings and ignores unknown ids. If an export is dropped alone, its
  source is rendered again without it.
- An ingestion whose exports are all complete is rendered but has no task.

`validate` checks the invariants. The log keeps its last entries and a digest of all of them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from typing import Final, Literal, TypeAlias, assert_never

import msgspec

from actors.model.protocol.client_commands import merge_configuration
from actors.model.protocol.storage import (
    IngestionDescription,
    RunOneshotIngestion,
    SinkDescription,
    UpdateStorageConfiguration,
)
from actors.model.protocol.storage_internal import (
    CreateIngestionDataflow,
    DropObjects,
    InternalCommand,
    ResumeState,
    RunOneshotIngestionDataflow,
    RunSinkDataflow,
    StatisticsUpdate,
    SuspendAndRestart,
)
from actors.runtime.progress import ObjectId, is_empty

LOG_ENTRIES_MAX: Final = 256


def owner_of(id: ObjectId, count: int) -> int:
    """Return the index of the worker that runs an object's task. It is the same in every
    process."""
    return zlib.crc32(id.encode()) % count


class ObjectRendering(msgspec.Struct, frozen=True):
    """One rendering of an object."""

    number: int
    what: IngestionDescription | SinkDescription | RunOneshotIngestion
    resume: ResumeState = ResumeState()

    @property
    def id(self) -> ObjectId:
        """Return the object's id, which is the uuid for a one-shot ingestion."""
        return self.what.uuid if isinstance(self.what, RunOneshotIngestion) else self.what.id

    @property
    def ids(self) -> tuple[ObjectId, ...]:
        """Return the object's id followed by the ids of its exports."""
        return self.what.ids if isinstance(self.what, IngestionDescription) else (self.id,)

    @property
    def complete(self) -> bool:
        """Return whether all exports are complete, so that no task is needed."""
        uppers = self.resume.uppers
        return bool(uppers) and all(is_empty(upper) for _, upper in uppers)


class LogEntry(msgspec.Struct, frozen=True):
    """One change of the renderings. `index` is the command's position in the order."""

    index: int
    change: Literal["render", "suspend", "drop", "configure"]
    id: ObjectId = ""
    number: int = 0


class RenderLog:
    """Log of all rendering changes: their number, the last entries, and a digest of all entries
    with their descriptions."""

    def __init__(self) -> None:
        self.length = 0
        """Number of changes so far."""
        self.entries: deque[LogEntry] = deque(maxlen=LOG_ENTRIES_MAX)
        """The last changes."""
        self._digest = b""
        """Digest of all changes so far, with their descriptions."""

    @property
    def digest(self) -> str:
        """Return the digest. It is equal on two workers if all of their changes were equal."""
        return self._digest.hex()

    def add(self, entry: LogEntry, what: object = None) -> None:
        """Add a change; `what` is the rendered object."""
        self.length += 1
        self.entries.append(entry)
        text = self._digest + msgspec.msgpack.encode((entry, what))
        self._digest = hashlib.blake2b(text, digest_size=16).digest()


class RenderingStarted(msgspec.Struct, frozen=True):
    """A rendering started, replacing `former` if there was one."""

    rendering: ObjectRendering
    former: ObjectRendering | None


class RenderingEnded(msgspec.Struct, frozen=True):
    """A rendering ended because its object was dropped, or was suspended to be rendered again."""

    rendering: ObjectRendering
    dropped: bool


class UnrenderedSourceDropped(msgspec.Struct, frozen=True):
    """A source was dropped that had no rendering."""

    description: IngestionDescription


class ConfigurationChanged(msgspec.Struct, frozen=True):
    """The configuration changed."""

    configuration: UpdateStorageConfiguration


Change: TypeAlias = (
    RenderingStarted | RenderingEnded | UnrenderedSourceDropped | ConfigurationChanged
)


class RenderingSet:
    """All current renderings; see the module's docstring."""

    def __init__(self) -> None:
        self.current: dict[ObjectId, ObjectRendering] = {}
        """Current rendering of each object, by id."""
        self.last_number = 0
        """Number of the latest rendering."""
        self.configuration = UpdateStorageConfiguration()
        """Configuration merged from all updates so far."""
        self.log = RenderLog()
        """Log of all changes."""
        self.ignored = 0
        """Number of restart commands for renderings that had already ended."""
        self._source_of: dict[ObjectId, ObjectId] = {}
        """Source of each export that is rendered."""

    def apply(self, index: int, command: InternalCommand) -> list[Change]:
        """Apply the command at position `index` of the order, and return the resulting changes."""
        match command:
            case CreateIngestionDataflow():
                return [self._render(index, command.description, command.resume)]
            case RunSinkDataflow():
                return [self._render(index, command.description)]
            case RunOneshotIngestionDataflow():
                return [self._render(index, command.oneshot)]
            case SuspendAndRestart():
                return self._suspend(index, command)
            case DropObjects():
                return self._drop(index, command)
            case UpdateStorageConfiguration():
                self.configuration = merge_configuration(self.configuration, command)
                self.log.add(LogEntry(index, "configure"), self.configuration)
                return [ConfigurationChanged(self.configuration)]
            case StatisticsUpdate():
                return []
            case _:
                assert_never(command)

    def _render(
        self,
        index: int,
        what: IngestionDescription | SinkDescription | RunOneshotIngestion,
        resume: ResumeState = ResumeState(),  # noqa: B008 (frozen)
    ) -> RenderingStarted:
        self.last_number += 1
        rendering = ObjectRendering(self.last_number, what, resume)
        former = self.current.get(rendering.id)
        if former is not None:
            self._remove(former)
        self.current[rendering.id] = rendering
        self._source_of |= dict.fromkeys(rendering.ids[1:], rendering.id)
        self.log.add(LogEntry(index, "render", rendering.id, rendering.number), (what, resume))
        return RenderingStarted(rendering, former)

    def _remove(self, rendering: ObjectRendering) -> None:
        del self.current[rendering.id]
        for export in rendering.ids[1:]:
            if self._source_of.get(export) == rendering.id:
                del self._source_of[export]

    def _suspend(self, index: int, command: SuspendAndRestart) -> list[Change]:
        rendering = self.current.get(command.id)
        if rendering is None or rendering.number != command.number:
            # A later rendering has already replaced the failed one.
            self.ignored += 1
            return []
        self._remove(rendering)
        self.log.add(LogEntry(index, "suspend", rendering.id, rendering.number))
        return [RenderingEnded(rendering, dropped=False)]

    def _drop(self, index: int, command: DropObjects) -> list[Change]:
        changes: list[Change] = []
        fewer: dict[ObjectId, set[ObjectId]] = {}
        for id in command.ids:
            rendering = self.current.get(id)
            if rendering is not None:
                self._remove(rendering)
                self.log.add(LogEntry(index, "drop", id, rendering.number))
                changes.append(RenderingEnded(rendering, dropped=True))
        ended = {change.rendering.id for change in changes if isinstance(change, RenderingEnded)}
        # A source may have external resources even while it is not rendered.
        changes += (
            UnrenderedSourceDropped(gone) for gone in command.forgotten if gone.id not in ended
        )
        for id in command.ids:
            # An export whose source was dropped above no longer has an entry.
            source = self._source_of.get(id)
            if source is not None:
                fewer.setdefault(source, set()).add(id)
        for source, gone in fewer.items():
            changes.append(self._without(index, self.current[source], gone))
        return changes

    def _without(
        self, index: int, rendering: ObjectRendering, gone: set[ObjectId]
    ) -> RenderingStarted:
        """Render a source again without some of its exports."""
        assert isinstance(rendering.what, IngestionDescription)
        kept = tuple(export for export in rendering.what.exports if export.id not in gone)
        uppers = tuple((id, upper) for id, upper in rendering.resume.uppers if id not in gone)
        return self._render(
            index,
            msgspec.structs.replace(rendering.what, exports=kept),
            msgspec.structs.replace(rendering.resume, uppers=uppers),
        )

    def validate(self) -> None:
        """Assert the invariants."""
        numbers = [rendering.number for rendering in self.current.values()]
        assert len(set(numbers)) == len(numbers)
        assert all(0 < number <= self.last_number for number in numbers)
        for id, rendering in self.current.items():
            assert rendering.id == id
        for export, source in self._source_of.items():
            assert export in self.current[source].ids

"""Messages of the controller's actors. They stay within the process and are passed by reference.

A session that sends a request to the controller waits for room; answers use the room that the
request reserved (`ActorAddress.reply`). The controller never waits to send.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import msgspec

from actors.control.access.access_rules import AccessRules, RoleLogin, TokenLogin
from actors.control.access.open_sessions import OpenSession
from actors.control.controller.catalog.catalog import CatalogObject
from actors.control.controller.tables.commit import PlannedWrite
from actors.control.controller.tables.groups import TableTarget
from actors.control.controller.tables.staged import StagedCopy
from actors.model.protocol import api
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import ActorAddress, ReplySlot
from actors.runtime.progress import Frontier, ObjectId, ShardId, Time

BARE_ANSWER_BYTES: Final = 256
"""Bytes charged for an answer without rows."""


def changes_bytes(changes: api.SubscribeChanges) -> int:
    """Return the bytes charged for a subscribe's changes until they are delivered."""
    return BARE_ANSWER_BYTES if changes.arrow is None else len(changes.arrow)


# -- sessions → controller -------------------------------------------------------------------------


class SubmitRequest(msgspec.Struct, frozen=True, gc=False):
    """A request, whose answers (`api.Answer`) are delivered to `session`."""

    session: ActorAddress[Any]
    request: api.Request
    peer: str = ""
    """The client's address, for display."""
    role: str | None = None
    """Role of the session; None if it is trusted and may do everything (`access.access_rules`)."""
    opened: OpenSession | None = None
    """The session as listed among the sessions of all listeners."""


class BytesDelivered(msgspec.Struct, frozen=True, gc=False):
    """The session has delivered so many bytes of a subscribe's changes, or of a read's rows."""

    session: str
    request: int
    bytes: int


class SessionClosed(msgspec.Struct, frozen=True, gc=False):
    """The session has stopped: end its requests."""

    session: str


class PinObjects(msgspec.Struct, frozen=True, gc=False):
    """A reader in this process asks for the catalog, unless it still has seqno `seqno`, and for the
    time at which to read the objects of these names together. Fails with `UnknownObject` and
    `InvalidUsage`."""

    names: tuple[str, ...]
    seqno: int | None
    """Sequence number of the catalog that the reader has; -1 if it has none."""
    reply: ReplySlot[PinnedObjects]


class PinnedObjects(msgspec.Struct, frozen=True, gc=False):
    """Answer to `PinObjects`: a read at `time` sees every write that was acknowledged before."""

    seqno: int | None
    objects: tuple[CatalogObject, ...] | None
    """All objects of the catalog; None if the reader's catalog is current."""
    time: Time
    missing: str = ""
    """Name of a source's table below the objects that has no contents yet: a read waits for it."""
    access: AccessRules = AccessRules()
    """The current roles and their rights."""


class FindLogin(msgspec.Struct, frozen=True, gc=False):
    """A listener in this process asks how to authenticate a user of this name."""

    name: str
    reply: ReplySlot[RoleLogin]


class CountReplicas(msgspec.Struct, frozen=True, gc=False):
    """A monitor in this process asks how many replicas the controller is connected to."""

    reply: ReplySlot[int]


class ObjectReadiness(msgspec.Struct, frozen=True, gc=False):
    """The condition of one object, for a monitor."""

    name: str
    kind: str
    state: str
    lag_ms: int
    reason: str = ""
    since_ms: Time = 0
    retries: int = 0


class InspectObjects(msgspec.Struct, frozen=True, gc=False):
    """A monitor in this process asks for the condition of all objects."""

    reply: ReplySlot[tuple[ObjectReadiness, ...]]


class FindToken(msgspec.Struct, frozen=True, gc=False):
    """A listener in this process asks which role a token proves."""

    digest: bytes
    reply: ReplySlot[TokenLogin]


# -- table writer ----------------------------------------------------------------------------------


class EnqueueWrite(msgspec.Struct, frozen=True, gc=False):
    """A write for the next group. `at` fixes its time; only tests set it."""

    session: ActorAddress[Any]
    request: int
    write: PlannedWrite
    at: Time | None = None


class TickTables(msgspec.Struct, frozen=True, gc=False):
    """Seal the tables at a new time, without rows. Answered with that time."""

    reply: ReplySlot[Time]


class CloseTable(msgspec.Struct, frozen=True, gc=False):
    """Prepare the drop of a table: answered once no earlier write to it is running."""

    id: ObjectId
    reply: ReplySlot[None]


class ArrangeTable(msgspec.Struct, frozen=True, gc=False):
    """Arrange a table's contents by its key, for reads by key."""

    target: TableTarget


class AlterTable(msgspec.Struct, frozen=True, gc=False):
    """Change a table's schema: `work` makes it durable between two writes, and its result is
    the answer. Later writes are fitted to the columns of `target`."""

    target: TableTarget
    work: Callable[[], Awaitable[Any]]
    reply: ReplySlot[Any]


class AppendCopy(msgspec.Struct, frozen=True, gc=False):
    """Append a copy from files at its own time. From now on the table writer owns the parts;
    it sends `CopyAppended` to the controller."""

    name: str
    copy: StagedCopy


TableWriterMessage: TypeAlias = (
    EnqueueWrite | TickTables | CloseTable | ArrangeTable | AlterTable | AppendCopy
)


class CopyTurn(msgspec.Struct, frozen=True, gc=False):
    """Result of an effect of `CopiesFrom`."""


class CopyAppended(CopyTurn, frozen=True, gc=False):
    """Table writer → controller: all rows of the copy are durable at `time`, or it failed."""

    name: str
    rows: int = 0
    time: Time = 0
    repeated: bool = False
    error: PenstockError | None = None


class TablesAdvanced(msgspec.Struct, frozen=True, gc=False):
    """Table writer → controller: every table is sealed below `upper`."""

    upper: Frontier
    wrote: bool = True
    """True if rows were written, False if only the time advanced."""


# -- maintenance -----------------------------------------------------------------------------------


class ShardsAppended(msgspec.Struct, frozen=True, gc=False):
    """Shards that were appended to."""

    shards: tuple[ShardId, ...]


class ShardsDropped(msgspec.Struct, frozen=True, gc=False):
    """Shards that were dropped."""

    shards: tuple[ShardId, ...]


MaintenanceMessage: TypeAlias = ShardsAppended | ShardsDropped

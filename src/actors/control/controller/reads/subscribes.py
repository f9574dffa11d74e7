"""Subscribes: clients that follow the changes of an object, each under a durable hold.

A subscribe has delivered everything below `delivered`. It holds its shard at ``delivered - 1``,
where a dataflow without a snapshot resumes exactly. `SubscribeFanout` decides which subscribes
share a dataflow, and which part of each batch every one is sent.

For slow clients, the bytes that the session has not delivered are counted. Beyond
`subscribe_inflight_bytes_max` the subscribe leaves its dataflow, without affecting the others; once
the session has caught up to half of that, it resumes from `delivered`. A subscribe whose client
takes nothing for `subscribe_idle_ms` ends with `SlowSubscriber`, and its hold is dropped.

A batch that is too large for one answer arrives as blobs. Its subscribes leave their dataflow as
slow ones do, read the blobs piece by piece, and join again afterwards. Each piece but the last has
``upper == lower`` and `partial` set.

Rules: ``lower`` of each answer is the ``upper`` of the previous one; an error of the view ends the
subscribe; the empty upper ends it with `RequestDone`; `up_to` ends it with an answer that has the
empty upper.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from actors.control.controller.catalog.boot import shard_import
from actors.control.controller.catalog.catalog import INDEX, CatalogObject
from actors.control.controller.holds import subscribe_holder
from actors.control.controller.messages import changes_bytes
from actors.control.controller.open_requests import OpenRequests
from actors.control.controller.reads.fanout import (
    BatchBlobs,
    BatchReader,
    FanoutMember,
    SubscribeFanout,
)
from actors.control.controller.roles.revocation import TRUSTED, HeldRights
from actors.control.controller.state import ControllerState, reply_error, to_penstock_error
from actors.model.protocol.api import RequestDone, SubscribeChanges, SubscribeObject
from actors.model.protocol.compute import (
    Command,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeResponse,
)
from actors.runtime.errors import (
    ConnectionBroken,
    InvalidUsage,
    PenstockError,
    ReadBelowSince,
    SlowSubscriber,
    from_wire,
)
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import EMPTY, TIME_MAX, Frontier, ObjectId, ShardId, Time, is_empty
from actors.runtime.spans import accept_context, use_context
from actors.runtime.threshold_probes import SUBSCRIBE_ROOM

log = logging.getLogger("penstock.controller")


class SubscribeHoldAcquired(msgspec.Struct, frozen=True, gc=False):
    """The subscribe's durable hold was taken, with the shard's since; or taking it failed."""

    holder: str
    since: Time = 0
    error: PenstockError | None = None


class PieceRead(msgspec.Struct, frozen=True, gc=False):
    """A piece of a batch was read (None: it no longer exists), or reading it failed."""

    holder: str
    key: str
    arrow: bytes | None = None
    error: PenstockError | None = None


class PieceDue(msgspec.Struct, frozen=True, gc=False):
    """Time to read a piece; sent again after a failure."""

    holder: str


class _Subscription(FanoutMember, eq=False, kw_only=True):
    session: ActorAddress[Any]
    number: int
    entry: CatalogObject
    rights: HeldRights
    held: bool = False
    """True once the durable hold was taken."""
    progress: bool
    """True if the client wants answers that only report progress."""
    reported: Frontier
    """Upper of the last answer."""
    in_flight: int = 0
    """Bytes sent to the session and not delivered yet."""
    taken_ms: float = 0.0
    """Time (monotonic, ms) at which the session last delivered changes, or received some while it
    had none."""
    way: BatchReader | None = None
    """Position in a batch of blobs that is not fully sent yet."""


class RunningSubscribes(OpenRequests[_Subscription]):
    """All running subscribes."""

    canceled_text = "unsubscribed"

    def __init__(self, state: ControllerState) -> None:
        super().__init__()
        self._state = state
        self._fanout = SubscribeFanout(state.transient_id)
        """Streams that the subscribes share."""
        self._by_holder: dict[str, _Subscription] = {}
        """Running subscribes by the holder of their durable hold."""
        self._ended_early: dict[str, ShardId] = {}
        """Shards of subscribes that ended before their hold was taken, by holder: the hold is to be
        dropped."""

    # -- starting ----------------------------------------------------------------------------------

    def subscribe(
        self,
        session: ActorAddress[Any],
        request: SubscribeObject,
        rights: HeldRights = TRUSTED,
    ) -> None:
        """Start a subscribe, which needs these rights. Raises `InvalidUsage` and its subclasses."""
        state = self._state
        entry = state.catalog.find_stored(request.name, "subscribe")
        if entry.kind == INDEX:
            on = state.catalog.by_id(entry.depends[0])
            raise InvalidUsage(f"cannot subscribe to index {entry.name}: subscribe to {on.name}")
        what = f"subscribe to {entry.name}"
        if request.from_ is not None and request.as_of is not None:
            raise InvalidUsage(f"{what}: give either from_ or as_of, not both")
        start = request.from_ if request.from_ is not None else request.as_of
        for given in (start, request.up_to):
            if given is not None and not (0 <= given <= TIME_MAX or given == EMPTY):
                raise InvalidUsage(f"{what}: invalid time {given}: expected 0 to {TIME_MAX}")
        if start == EMPTY:
            session.reply(SubscribeChanges(request.request, EMPTY, EMPTY))
            session.reply(RequestDone(request.request))
            return
        if start is not None:
            state.check_time(what, start)
        # Nothing precedes ``from_=0``: it means the contents at time 0, like an as_of.
        if request.from_:
            as_of, snapshot, delivered = request.from_ - 1, False, request.from_
        else:
            as_of = max(state.latest(entry), entry.as_of) if start is None else start
            # The updates of a snapshot have the time as_of, so without it delivery starts one
            # later.
            snapshot, delivered = request.snapshot, as_of if request.snapshot else as_of + 1
        up_to = EMPTY if request.up_to is None else request.up_to
        if up_to < delivered or (snapshot and up_to == delivered):
            raise InvalidUsage(
                f"{what} from {delivered} up to {up_to} would be empty: give a later up_to"
            )
        if up_to == delivered:  # the resuming client has already received everything
            session.reply(SubscribeChanges(request.request, up_to, EMPTY))
            session.reply(RequestDone(request.request))
            return
        id_ = state.transient_id()
        made = _Subscription(
            id=id_,
            name=entry.name,
            imported=shard_import(entry),
            as_of=as_of,
            snapshot=snapshot,
            delivered=delivered,
            up_to=up_to,
            progress=request.progress,
            reported=delivered,
            hold=as_of,
            session=session,
            number=request.request,
            entry=entry,
            rights=rights,
        )
        self._opened(made)
        self._by_holder[subscribe_holder(id_)] = made
        self._hold(made)

    def _hold(self, made: _Subscription) -> None:
        holder = subscribe_holder(made.id)
        self._state.hold(
            made.shard,
            holder,
            made.as_of,
            done=lambda found: SubscribeHoldAcquired(holder, found),
            failed=lambda error: SubscribeHoldAcquired(holder, 0, error),
        )

    def hold_acquired(self, message: SubscribeHoldAcquired) -> None:
        """Join a dataflow now that the hold was taken, or refuse the subscribe."""
        made = self._by_holder.get(message.holder)
        if made is None:
            self._release(message.holder)
            return
        made.held = True
        if message.error is not None:
            self._end(made, message.error)
        elif made.as_of < message.since:
            wanted = made.as_of if made.snapshot else made.delivered
            text = (
                f"subscribe to {made.entry.name} from {wanted}: its history begins at "
                f"{message.since}"
            )
            self._end(made, ReadBelowSince(text))
        else:
            self._tell(self._fanout.join(made))

    def _release(self, holder: str) -> None:
        """Drop a hold that was taken after its subscribe had ended."""
        shard = self._ended_early.pop(holder, None)
        if shard is not None:
            self._state.drop_hold(shard, holder)

    def _tell(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._state.command(command)

    # -- batches -------------------------------------------------------------------------------

    def responded(self, response: SubscribeResponse) -> None:
        """Handle a batch. A batch of a dataflow without members is ignored."""
        members = self._fanout.members(response.id)
        match response.batch:
            case SubscribeBatch(error=None) as batch:
                self._batch(response.id, batch)
            case SubscribeBatch(error=(code, text)) as batch:
                self._remove([part.key for part in batch.parts])
                for made in members:
                    self._end(_subscription(made), from_wire(code, text, True))
            case SubscribeDropped():
                for made in members:
                    error = f"the subscribe to {made.name} was dropped by its replica"
                    self._end(_subscription(made), ConnectionBroken(error))

    def _batch(self, id_: ObjectId, batch: SubscribeBatch) -> None:
        deliveries, commands = self._fanout.batch(id_, batch)
        self._tell(commands)
        traceparent = accept_context(batch.traceparent) if batch.arrow or batch.parts else None
        keys = [part.key for part in batch.parts]
        shelf = BatchBlobs(keys, len(deliveries))
        if not deliveries:
            self._remove(keys)
        for each in deliveries:
            made, arrow = _subscription(each.member), each.arrow
            if keys:
                # It leaves its dataflow until it has received all pieces. So it does not matter if
                # a replica is lost or the dataflow restarts in the meantime.
                made.way = BatchReader(shelf, each.lower, each.upper)
                self._tell(self._fanout.leave(made))
                if arrow is not None:
                    self._send(made, arrow, traceparent, partial=True)
                self._next_piece(made)
                continue
            over = each.upper >= made.up_to
            # Progress alone waits until the client has taken everything (`bytes_delivered`).
            if arrow is not None or over or (made.progress and not made.in_flight):
                self._send(made, arrow, None if arrow is None else traceparent)
            if over:
                self._over(made, each.upper)
            elif SUBSCRIBE_ROOM.crossed(
                made.in_flight > self._state.settings.subscribe_inflight_bytes_max
            ):
                self._tell(self._fanout.leave(made))

    def _over(self, made: _Subscription, upper: Frontier) -> None:
        """End a subscribe that has received everything below its `up_to`."""
        if not is_empty(upper):
            made.session.reply(SubscribeChanges(made.number, upper, EMPTY))
        made.session.reply(RequestDone(made.number))
        self._end(made, None)

    # -- pieces --------------------------------------------------------------------------------

    def _next_piece(self, made: _Subscription) -> None:
        """Read the next piece if there is room for it."""
        way, limit = made.way, self._state.settings.subscribe_inflight_bytes_max
        if way is None or way.reading or made.in_flight > limit // 2:
            return
        way.reading = True
        self.piece_due(PieceDue(subscribe_holder(made.id)))

    def piece_due(self, message: PieceDue) -> None:
        """Read a piece."""
        made, holder = self._by_holder.get(message.holder), message.holder
        if made is None or made.way is None:
            return
        stashed, key = self._state.persist.stashed, made.way.present
        self._state.ctx.effect(
            lambda: stashed.get(key),
            done=lambda arrow: PieceRead(holder, key, arrow),
            failed=lambda error: PieceRead(holder, key, None, to_penstock_error(error)),
        )

    def piece_read(self, message: PieceRead) -> None:
        """Send a piece to the session. After the last one, join a dataflow again."""
        made, settings = self._by_holder.get(message.holder), self._state.settings
        way = None if made is None else made.way
        if made is None or way is None or way.present != message.key:
            return
        if message.error is not None:
            way.attempts += 1
            if way.attempts >= settings.fetch_attempts_max:
                self._end(made, message.error)
                return
            delay = settings.retry_delay_ms(way.attempts)
            self._state.ctx.after(delay, PieceDue(message.holder))
        elif message.arrow is None:
            text = (
                f"the subscribe to {made.name} did not take the changes at [{way.lower}, "
                f"{way.upper}) within {settings.stash_orphan_ms} ms (stash_orphan_ms): subscribe "
                f"again from {made.reported}, or start over and discard what you received since"
            )
            self._end(made, SlowSubscriber(text))
        else:
            arrow, last = way.cut(message.arrow), way.last
            self._remove(way.advance())
            if last:
                made.way = None
                self._send(made, arrow, None)
                if way.upper >= made.up_to:
                    self._over(made, way.upper)
                else:
                    self._join(made)
            else:
                if arrow is not None:
                    self._send(made, arrow, None, partial=True)
                self._next_piece(made)

    def _join(self, made: _Subscription) -> None:
        """Join a dataflow again if there is room."""
        limit = self._state.settings.subscribe_inflight_bytes_max
        paused = made.held and made.stream is None and made.way is None
        if paused and made.in_flight <= limit // 2:
            self._tell(self._fanout.join(made))

    def _remove(self, keys: Sequence[str]) -> None:
        """Delete blobs that no subscribe needs. A blob that cannot be deleted now becomes an
        orphan."""
        stashed = self._state.persist.stashed
        if keys:
            self._state.ctx.effect(lambda: stashed.delete(keys), done=lambda _: None)

    def _send(
        self,
        made: _Subscription,
        arrow: bytes | None,
        traceparent: str | None,
        *,
        partial: bool = False,
    ) -> None:
        """Send everything below `delivered` that was not sent yet; `partial` marks a piece of
        it."""
        # A piece leaves the interval open: its upper is its lower.
        upper = made.reported if partial else made.delivered
        reads = made.rights.reads if arrow is not None else ()
        changes = SubscribeChanges(made.number, made.reported, upper, arrow, partial, reads)
        with use_context(traceparent):
            made.session.reply(changes)
        made.reported = upper
        if not made.in_flight:
            made.taken_ms = self._state.ctx.monotonic_ms()
        made.in_flight += changes_bytes(changes)

    def bytes_delivered(self, session: str, request: int, size: int) -> None:
        """Count the bytes that the session has delivered. A paused subscribe may resume."""
        made = self._open.get((session, request))
        if made is None:
            return
        made.in_flight = max(0, made.in_flight - size)
        made.taken_ms = self._state.ctx.monotonic_ms()
        self._next_piece(made)
        self._join(made)
        behind = made.reported < made.delivered and made.way is None
        if made.progress and not made.in_flight and behind:
            self._send(made, None, None)

    def cut_off(self) -> None:
        """End the subscribes whose clients take nothing of what is waiting for them."""
        limit = self._state.settings.subscribe_idle_ms
        now = self._state.ctx.monotonic_ms()
        for made in list(self._open.values()):
            # Its hold retains history, which must not be kept forever for a client that does not
            # read.
            if made.in_flight and now - made.taken_ms >= limit:
                text = (
                    f"the client of the subscribe to {made.name} read none of the "
                    f"{made.in_flight} bytes waiting for it in {limit} ms (subscribe_idle_ms): "
                    "subscribe again from the upper of the last change, and read continuously"
                )
                log.warning("%s: %s", made.session.path, text)
                self._end(made, SlowSubscriber(text))

    def hold_moves(self) -> list[tuple[ShardId, str, Time]]:
        """Return the moves of the subscribes' holds, and compact their dataflows."""
        moves = []
        for holder, made in self._by_holder.items():
            since = made.since()
            if made.held and since > made.hold:
                # Recorded before the move is durable: until then the hold only keeps more history.
                made.hold = since
                moves.append((made.shard, holder, since))
        self._tell(self._fanout.compact())
        return moves

    # -- reporting -----------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``penstock.subscribes``."""
        now = self._state.ctx.monotonic_ms()
        for made in self._open.values():
            yield (
                made.session.path,
                made.number,
                made.name,
                None if is_empty(made.reported) else made.reported,
                None if is_empty(made.delivered) else made.delivered,
                made.hold if made.held else None,
                made.in_flight,
                now - made.taken_ms if made.in_flight else None,
                None if made.stream is None else made.stream.id,
            )

    # -- ending --------------------------------------------------------------------------------

    def _end(self, made: _Subscription, error: PenstockError | None) -> None:
        if error is not None:
            reply_error(made.session, made.number, error)
        if made.way is not None:
            self._remove(made.way.abandon())
            made.way = None
        holder = subscribe_holder(made.id)
        self._closed(made)
        del self._by_holder[holder]
        self._tell(self._fanout.leave(made))
        if made.held:
            self._state.drop_hold(made.shard, holder)
        else:
            # The hold is still being taken: `hold_acquired` drops it.
            self._ended_early[holder] = made.shard


def _subscription(member: FanoutMember) -> _Subscription:
    assert isinstance(member, _Subscription)
    return member

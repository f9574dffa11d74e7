"""What dropped sources have left outside (a replication slot), remembered until it is gone.

Theory of operation. The set that drops a source also makes a key, `leftover/ID`, with all that is
needed to remove what the outside keeps for it. The cluster does that when the source's task has
stopped. A while after it has said so, or a cluster is connected that was not told of the source,
it is done here once more, which finds nothing to do where the cluster did it; then the key goes.
What cannot be reached is tried again, with delays that grow; after a restart too. It is listed
with the sources, as *dropped*, with the reason.

Rules:
- what a source of now uses is never removed: a leftover of the same name outside is held back,
  and what was under way for it is canceled;
- a person may say that it be forgotten: then only the key goes, and what is outside is theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

import anyio
import msgspec

from actors.controller.catalog import SOURCE, CatalogObject
from actors.controller.desk import Desk, fault, refuse
from actors.controller.leftover_record import Leftover, leftover_of, unremember
from actors.errors import PenstockError, UnknownObject
from actors.kernel import Address
from actors.kernel.actor import Effect
from actors.progress import EMPTY, ObjectId
from actors.protocol.api import Done
from actors.protocol.api_storage import ForgetSource, Health, SourceStatus
from actors.sources.source import Unreachable

log = logging.getLogger("penstock.controller")

DELAY_MS_MIN: Final = 1_000
DELAY_MS_MAX: Final = 60_000
ATTEMPT_MS_MAX: Final = 60_000
DROPPED: Final = "dropped"


class LeftoverTurn(msgspec.Struct, frozen=True, gc=False):
    """To the controller: it is time to try (`tried` False), or a try has ended, with an error or
    without."""

    id: ObjectId
    tried: bool = False
    error: PenstockError | None = None


class LeftoverForgotten(msgspec.Struct, frozen=True, gc=False):
    """To the controller: these are gone, as a person wished, or are not."""

    session: Address[Any]
    request: ForgetSource
    ids: tuple[ObjectId, ...]
    error: PenstockError | None = None


class _Pending(msgspec.Struct):
    """One, and where it stands."""

    leftover: Leftover
    failures: int = 0
    since_ms: int = 0
    error: str = ""
    attempt: Effect | None = None
    """The effect under way."""
    due: bool = False
    """A try is scheduled, or under way."""


class Leftovers:
    """All of them; a part of the controller."""

    def __init__(self, desk: Desk, found: tuple[Leftover, ...]) -> None:
        self._desk = desk
        now = desk.ctx.now_ms()
        self._all = {each.id: _Pending(each, since_ms=now) for each in found}

    # -- what happens ------------------------------------------------------------------------------

    def dropped(self, entry: CatalogObject) -> None:
        """A source is no longer in the catalog; the cluster is about to be told."""
        kept = self._kept(entry)
        if kept:
            leftover = leftover_of(entry, kept)
            self._all[entry.id] = _Pending(leftover, since_ms=self._desk.ctx.now_ms())

    def created(self, entry: CatalogObject) -> None:
        """A source is in the catalog: what it uses outside is not removed any more."""
        kept = self._kept(entry)
        for pending in self._all.values():
            if pending.leftover.kept == kept and pending.attempt is not None:
                pending.attempt.cancel()
                self._failed(pending, self._in_use(pending))

    def let_go(self, id_: ObjectId) -> None:
        """The cluster has, or is about to: in a while it is looked whether anything is left."""
        pending = self._all.get(id_)
        if pending is not None and not pending.due:
            pending.due = True
            self._desk.ctx.after(DELAY_MS_MIN, LeftoverTurn(id_))

    def connected(self) -> None:
        """A cluster was told of all sources: it has none of these, or is letting go of it."""
        for id_ in list(self._all):
            self.let_go(id_)

    def turn(self, message: LeftoverTurn | LeftoverForgotten) -> None:
        """What its own doings have brought."""
        if isinstance(message, LeftoverForgotten):
            self._forgotten(message)
            return
        pending = self._all.get(message.id)
        if pending is None:
            return  # a person had it forgotten
        if not message.tried:
            self._try(pending)
            return
        if pending.attempt is None:
            return  # it was canceled
        pending.attempt = None
        if message.error is None:
            del self._all[message.id]
            log.info("what the outside kept for source %s is gone", pending.leftover.name)
        else:
            self._failed(pending, message.error)

    # -- removing it -------------------------------------------------------------------------------

    def _kept(self, entry: CatalogObject) -> str:
        if entry.kind != SOURCE or entry.configuration is None:
            return ""
        return self._desk.outside.makers.kept(entry.configuration, entry.id)

    def _in_use(self, pending: _Pending) -> PenstockError | None:
        """Why it is held back, if it is."""
        for entry in self._desk.catalog.of_kind(SOURCE):
            if self._kept(entry) == pending.leftover.kept:
                return PenstockError(f"source {entry.name} uses {pending.leftover.kept} now")
        return None

    def _try(self, pending: _Pending) -> None:
        pending.due = True
        in_use = self._in_use(pending)
        if in_use is not None:
            self._failed(pending, in_use)
            return
        id_ = pending.leftover.id
        pending.attempt = self._desk.ctx.effect(
            lambda: self._remove(pending.leftover),
            done=lambda _: LeftoverTurn(id_, tried=True),
            failed=lambda error: LeftoverTurn(id_, tried=True, error=fault(error)),
        )

    async def _remove(self, leftover: Leftover) -> None:
        try:
            with anyio.fail_after(ATTEMPT_MS_MAX / 1000):
                source = self._desk.outside.makers.source(leftover.configuration, leftover.id)
                try:
                    await source.forget()
                finally:
                    with anyio.CancelScope(shield=True):
                        await source.close()
        except TimeoutError:
            raise Unreachable(f"the outside did not answer within {ATTEMPT_MS_MAX} ms") from None
        await unremember(self._desk.persist, leftover)

    def _failed(self, pending: _Pending, error: PenstockError | None) -> None:
        pending.attempt = None
        pending.due = True
        pending.failures += 1
        told = "" if error is None else f"{type(error).__name__}: {error}"
        news = told != pending.error
        if news:
            pending.error, pending.since_ms = told, self._desk.ctx.now_ms()
        if news or pending.failures == 2:
            log.log(
                # The cluster may be about it at this moment, which fails one of the two.
                logging.INFO if pending.failures == 1 else logging.WARNING,
                "source %s was dropped, but %s is still there: %s; it is tried again, until"
                " `penstock source forget` gives it up",
                pending.leftover.name,
                pending.leftover.kept,
                told,
            )
        delay_ms = min(DELAY_MS_MAX, DELAY_MS_MIN << min(pending.failures - 1, 20))
        self._desk.ctx.after(delay_ms, LeftoverTurn(pending.leftover.id))

    # -- for people --------------------------------------------------------------------------------

    def forget(self, session: Address[Any], request: ForgetSource) -> None:
        """Removes nothing outside, and speaks of it no more. Raises `UnknownObject`."""
        ids = tuple(id_ for id_, each in self._all.items() if each.leftover.name == request.name)
        if not ids:
            there = ", ".join(sorted({each.leftover.name for each in self._all.values()}))
            raise UnknownObject(
                f"no dropped source {request.name!r} has left anything outside that is known; "
                f"those that have: {there or 'none'}"
            )

        records = [self._all[id_].leftover for id_ in ids]

        async def give_up() -> None:
            for each in records:
                await unremember(self._desk.persist, each)

        self._desk.ctx.effect(
            give_up,
            done=lambda _: LeftoverForgotten(session, request, ids),
            failed=lambda error: LeftoverForgotten(session, request, ids, fault(error)),
        )

    def _forgotten(self, message: LeftoverForgotten) -> None:
        if message.error is not None:
            refuse(message.session, message.request.request, message.error)
            return
        left = [self._all.pop(id_, None) for id_ in message.ids]
        named = [each for each in left if each is not None]
        for each in named:
            if each.attempt is not None:
                each.attempt.cancel()
        text = ", ".join(each.leftover.kept for each in named)
        message.session.reply(Done(message.request.request, text))

    def statuses(self, *, failing: bool = False) -> Iterator[tuple[ObjectId, SourceStatus]]:
        """Return them as sources are listed; `failing`: those alone that could not be removed."""
        for id_, each in self._all.items():
            if failing and not each.error:
                continue
            leftover = each.leftover
            error = each.error or "it is being removed"
            health = Health(
                DROPPED,
                f"{leftover.kept} is still there outside: {error}",
                "it is tried again; `penstock source forget` gives it up, and leaves it to you",
                each.since_ms,
            )
            yield id_, SourceStatus(leftover.name, leftover.configuration.kind, health, EMPTY)

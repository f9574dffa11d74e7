"""Removes the external resources (replication slots) of dropped sources, retrying until it
succeeds.

The set that drops a source also stores a record, `leftover/ID`, with everything that the removal
needs. The cluster removes the resource once the source's task has stopped. After the cluster has
reported that, or after a cluster that does not run the source has connected, the controller waits a
while, repeats the removal (it is idempotent), and deletes the record. Failures are retried with
backoff, even after a restart. Until then the source is listed as *dropped*, with the reason.

Rules:
- a resource that an existing source uses is never removed: a record for the same resource is held
  back, and a running removal is canceled;
- a user may tell the service to leave a resource alone: then only the record is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

import anyio
import msgspec

from actors.connectors.sources.source import SourceUnreachable
from actors.control.controller.catalog.catalog import SOURCE, CatalogObject
from actors.control.controller.connectors.cleanup_record import (
    CleanupRecord,
    cleanup_record_of,
    delete_record,
)
from actors.control.controller.state import ControllerState, reply_error, to_penstock_error
from actors.model.protocol.api import ForgetSource, ObjectHealth, RequestDone, SourceStatus
from actors.runtime.errors import PenstockError, UnknownObject
from actors.runtime.kernel import ActorAddress
from actors.runtime.kernel.actor import RunningEffect
from actors.runtime.progress import EMPTY, ObjectId

log = logging.getLogger("penstock.controller")

DELAY_MS_MIN: Final = 1_000
DELAY_MS_MAX: Final = 60_000
ATTEMPT_MS_MAX: Final = 60_000
DROPPED: Final = "dropped"


class CleanupTurn(msgspec.Struct, frozen=True, gc=False):
    """A retry is due (`tried` False), or an attempt has ended, with or without an error."""

    id: ObjectId
    tried: bool = False
    error: PenstockError | None = None


class CleanupForgotten(msgspec.Struct, frozen=True, gc=False):
    """The records were deleted at a user's request, or deleting them failed."""

    session: ActorAddress[Any]
    request: ForgetSource
    ids: tuple[ObjectId, ...]
    error: PenstockError | None = None


class _Pending(msgspec.Struct):
    """One record and the state of its removal."""

    record: CleanupRecord
    failures: int = 0
    """Number of failed attempts so far."""
    since_ms: int = 0
    """Time of the drop, or of the last failure with a new error (ms since the epoch)."""
    error: str = ""
    """Text of the last failure; empty if there was none."""
    attempt: RunningEffect | None = None
    """The running attempt, if any."""
    due: bool = False
    """True if an attempt is scheduled or running."""


class ExternalCleanup:
    """All records and their removals; a part of the controller."""

    def __init__(self, state: ControllerState, found: tuple[CleanupRecord, ...]) -> None:
        self._state = state
        now = state.ctx.now_ms()
        self._all = {each.id: _Pending(each, since_ms=now) for each in found}
        """Records of dropped sources, by the source's id; removed with their resource."""

    # -- events ------------------------------------------------------------------------------------

    def dropped(self, entry: CatalogObject) -> None:
        """Add the record of a source that was removed from the catalog."""
        kept = self._kept(entry)
        if kept:
            record = cleanup_record_of(entry, kept)
            self._all[entry.id] = _Pending(record, since_ms=self._state.ctx.now_ms())

    def created(self, entry: CatalogObject) -> None:
        """Cancel the removal of a resource that a new source uses."""
        kept = self._kept(entry)
        for pending in self._all.values():
            if pending.record.kept == kept and pending.attempt is not None:
                pending.attempt.cancel()
                self._failed(pending, self._in_use(pending))

    def schedule_removal(self, id_: ObjectId) -> None:
        """Schedule an attempt: the cluster has removed the resource, or is about to."""
        pending = self._all.get(id_)
        if pending is not None and not pending.due:
            pending.due = True
            # Delayed, so that the cluster and the controller do not remove it at the same time.
            self._state.ctx.after(DELAY_MS_MIN, CleanupTurn(id_))

    def connected(self) -> None:
        """Schedule an attempt for each record: the new connection was not told to run those
        sources."""
        for id_ in list(self._all):
            self.schedule_removal(id_)

    def turn(self, message: CleanupTurn | CleanupForgotten) -> None:
        """Handle a timer, the end of an attempt, or the end of a deletion."""
        if isinstance(message, CleanupForgotten):
            self._forgotten(message)
            return
        pending = self._all.get(message.id)
        if pending is None:
            return  # a user chose to leave it alone
        if not message.tried:
            self._try(pending)
            return
        if pending.attempt is None:
            return  # the attempt was canceled
        pending.attempt = None
        if message.error is None:
            del self._all[message.id]
            log.info("removed the external resource of source %s", pending.record.name)
        else:
            self._failed(pending, message.error)

    # -- removal -----------------------------------------------------------------------------------

    def _kept(self, entry: CatalogObject) -> str:
        if entry.kind != SOURCE or entry.configuration is None:
            return ""
        return self._state.connector_store.makers.external_resource(entry.configuration, entry.id)

    def _in_use(self, pending: _Pending) -> PenstockError | None:
        """Return why the resource must stay, or None."""
        for entry in self._state.catalog.of_kind(SOURCE):
            if self._kept(entry) == pending.record.kept:
                return PenstockError(f"source {entry.name} now uses {pending.record.kept}")
        return None

    def _try(self, pending: _Pending) -> None:
        pending.due = True
        in_use = self._in_use(pending)
        if in_use is not None:
            self._failed(pending, in_use)
            return
        id_ = pending.record.id
        pending.attempt = self._state.ctx.effect(
            lambda: self._remove(pending.record),
            done=lambda _: CleanupTurn(id_, tried=True),
            failed=lambda error: CleanupTurn(id_, tried=True, error=to_penstock_error(error)),
        )

    async def _remove(self, record: CleanupRecord) -> None:
        try:
            with anyio.fail_after(ATTEMPT_MS_MAX / 1000):
                source = self._state.connector_store.makers.source(record.configuration, record.id)
                try:
                    await source.forget()
                finally:
                    with anyio.CancelScope(shield=True):
                        await source.close()
        except TimeoutError:
            raise SourceUnreachable(
                f"the external system did not answer within {ATTEMPT_MS_MAX} ms"
            ) from None
        # Delete the record last: after a crash in between, the removal is repeated.
        await delete_record(self._state.persist, record)

    def _failed(self, pending: _Pending, error: PenstockError | None) -> None:
        pending.attempt = None
        pending.due = True
        pending.failures += 1
        text = "" if error is None else f"{type(error).__name__}: {error}"
        news = text != pending.error
        if news:
            pending.error, pending.since_ms = text, self._state.ctx.now_ms()
        # Log each new reason once, and the second failure in a row again as a warning.
        if news or pending.failures == 2:
            log.log(
                # The cluster may be removing it at the same time, so that one of the two fails.
                logging.INFO if pending.failures == 1 else logging.WARNING,
                "source %s was dropped, but %s still exists: %s; retrying until it is removed, or"
                " `penstock source forget` leaves it to you",
                pending.record.name,
                pending.record.kept,
                text,
            )
        delay_ms = min(DELAY_MS_MAX, DELAY_MS_MIN << min(pending.failures - 1, 20))
        self._state.ctx.after(delay_ms, CleanupTurn(pending.record.id))

    # -- reporting ---------------------------------------------------------------------------------

    def forget(self, session: ActorAddress[Any], request: ForgetSource) -> None:
        """Delete the records of a source's name and leave the resources alone. Raises
        `UnknownObject`."""
        ids = tuple(id_ for id_, each in self._all.items() if each.record.name == request.name)
        if not ids:
            there = ", ".join(sorted({each.record.name for each in self._all.values()}))
            raise UnknownObject(
                f"dropped source {request.name!r} has no external resource left (sources that "
                f"have: {there or 'none'})"
            )

        records = [self._all[id_].record for id_ in ids]

        async def give_up() -> None:
            for each in records:
                await delete_record(self._state.persist, each)

        self._state.ctx.effect(
            give_up,
            done=lambda _: CleanupForgotten(session, request, ids),
            failed=lambda error: CleanupForgotten(session, request, ids, to_penstock_error(error)),
        )

    def _forgotten(self, message: CleanupForgotten) -> None:
        if message.error is not None:
            reply_error(message.session, message.request.request, message.error)
            return
        left = [self._all.pop(id_, None) for id_ in message.ids]
        named = [each for each in left if each is not None]
        for each in named:
            if each.attempt is not None:
                each.attempt.cancel()
        text = ", ".join(each.record.kept for each in named)
        message.session.reply(RequestDone(message.request.request, text))

    def statuses(self, *, failing: bool = False) -> Iterator[tuple[ObjectId, SourceStatus]]:
        """Yield the records in the form of listed sources; with `failing` only those whose removal
        has failed."""
        for id_, each in self._all.items():
            if failing and not each.error:
                continue
            record = each.record
            error = each.error or "removal in progress"
            health = ObjectHealth(
                DROPPED,
                f"{record.kept} still exists: {error}",
                "the removal is retried; `penstock source forget` leaves the resource to you",
                each.since_ms,
            )
            yield id_, SourceStatus(record.name, record.configuration.kind, health, EMPTY)

"""Mutants: each leaves out one rule of the halves, by patching, while its context manager lasts.

They prove the simulation: each must be found in few seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace

from actors.channel_adapter import NonceVerdict, StashRules
from actors.cluster import partitioned
from actors.cluster import storage_connection as storage_partitioned
from actors.compute import history as compute_reconcile
from actors.compute.history import ReconcileObstacle
from actors.compute.reads import PeekHolds
from actors.compute.state import ComputeState
from actors.progress import Frontier
from actors.protocol.compute import CreateDataflow, TaggedCommand
from actors.protocol.storage import SinkDescription, StorageTagged
from actors.protocol.storage_internal import DropObjects, RunSinkDataflow, SuspendAndRestart
from actors.storage import events as e
from actors.storage import history as storage_reconcile
from actors.storage import state as storage_state
from actors.storage.pursuits import DesiredState
from actors.storage.state import StorageState
from actors.storage.tasks import Shape, StorageTaskRunner
from actors.storage.telling import HealthBoard, StatisticsSums


@contextmanager
def drop_when_told() -> Iterator[None]:
    """Let a worker drop when its client says so, not at the drop's place in the one order."""
    right = StorageState._drop

    def drop(self: StorageState, id: str) -> list[e.Effect]:
        effects = right(self, id)
        self.renderings.apply(self.next_index, DropObjects((id,)))
        return effects

    with mock.patch.object(StorageState, "_drop", drop):
        yield


@contextmanager
def created_when_told() -> Iterator[None]:
    """Let worker 0 render a dataflow when its client creates it, the others when it is ordered."""
    right = ComputeState._tagged

    def tagged(self: ComputeState, event: TaggedCommand) -> Any:
        effects = right(self, event)
        if effects and isinstance(event.command, CreateDataflow) and self.incoming is None:
            effects = [*effects, *self._create(event.command.dataflow)]
        return effects

    with mock.patch.object(ComputeState, "_tagged", tagged):
        yield


@contextmanager
def rendered_after_its_drop() -> Iterator[None]:
    """Render a sink that is suspended late again, though it was dropped meanwhile."""
    right, dropped = DesiredState.suspended, DesiredState.drop
    gone: dict[str, Any] = {}

    def drop(self: DesiredState, *ids: str) -> Any:
        gone.update({id: self.get(id) for id in ids})
        return dropped(self, *ids)

    def suspended(self: DesiredState, id: str) -> Any:
        what = gone.get(id)
        if self.get(id) is None and isinstance(what, SinkDescription):
            return [RunSinkDataflow(what, 0)]
        return right(self, id)

    with (
        mock.patch.object(DesiredState, "drop", drop),
        mock.patch.object(DesiredState, "suspended", suspended),
    ):
        yield


@contextmanager
def late_commands_applied() -> Iterator[None]:
    """Take commands of a former client of the storage half for the present one's."""
    right = StorageState._tagged

    def tagged(self: StorageState, event: StorageTagged) -> list[e.Effect]:
        return right(self, replace(event, nonce=self.client.nonce or event.nonce))

    with mock.patch.object(StorageState, "_tagged", tagged):
        yield


@contextmanager
def late_commands_offered() -> Iterator[None]:
    """Propose commands of a former client of the compute half to the one order."""
    right = ComputeState._tagged

    def tagged(self: ComputeState, event: TaggedCommand) -> Any:
        return right(self, replace(event, nonce=self._offering or event.nonce))

    with mock.patch.object(ComputeState, "_tagged", tagged):
        yield


@contextmanager
def compaction_of_another() -> Iterator[None]:
    """Let the compaction of any object move the hold of every sink."""
    right = DesiredState.allow

    def allow(self: DesiredState, id: str, frontier: Frontier) -> None:
        for each in self.running():
            right(self, each, frontier)

    with mock.patch.object(DesiredState, "allow", allow):
        yield


@contextmanager
def furthest_upper_told() -> Iterator[None]:
    """Report an upper when the first worker has reported it."""
    with mock.patch.object(storage_partitioned, "min", max, create=True):
        yield


@contextmanager
def furthest_frontier_told() -> Iterator[None]:
    """Report a frontier of the compute half when the first worker has reported it."""
    with mock.patch.object(partitioned, "min", max, create=True):
        yield


@contextmanager
def unmentioned_kept() -> Iterator[None]:
    """Let a reconciliation keep the objects that the new client has not mentioned."""
    right = storage_reconcile.reconcile

    def reconcile(*given: Any) -> Any:
        return replace(right(*given), drop=())

    with mock.patch.object(storage_state, "reconcile", reconcile):
        yield


@contextmanager
def update_of_anything() -> Iterator[None]:
    """Accept forbidden updates of an object."""
    with (
        mock.patch.object(storage_state, "refusal", return_value=None),
        mock.patch.object(storage_reconcile, "refusal", return_value=None),
    ):
        yield


@contextmanager
def failure_of_all() -> Iterator[None]:
    """Restart all objects of a worker when one of them is restarted."""
    right = StorageState._restart

    def restart(self: StorageState, number: int) -> list[e.Effect]:
        effects = right(self, number)
        for other, task in self.tasks.running.items() if effects else ():
            if other != number:
                effects += self._propose(SuspendAndRestart(task.rendering.id, other, "beside"))
        return effects

    with mock.patch.object(StorageState, "_restart", restart):
        yield


@contextmanager
def reads_hold_nothing() -> Iterator[None]:
    """Compact an index beyond the reads that wait for it."""

    def earliest(self: Any, number: int) -> None:
        return None

    with (
        mock.patch("actors.compute.reads.PendingPeeks.earliest", earliest),
        mock.patch.object(PeekHolds, "validate"),
    ):
        yield


@contextmanager
def stash_goes_to_anybody() -> Iterator[None]:
    """Let an adapter pass on responses for a client that it has not served yet."""
    right = StashRules.judge

    def judge(self: StashRules, tagged: Any) -> NonceVerdict:
        strange = tagged.nonce not in self._served and self.connected
        return NonceVerdict.FORWARD if strange else right(self, tagged)

    with mock.patch.object(StashRules, "judge", judge):
        yield


@contextmanager
def proposals_not_counted() -> Iterator[None]:
    """Free a command's lane room when it was received, before its proposals are ordered."""
    right = StorageState._steps

    def steps(self: StorageState, steps: Sequence[Any]) -> list[e.Effect]:
        before = self.proposed
        effects = right(self, steps)
        self.proposed = before
        return effects

    with mock.patch.object(StorageState, "_steps", steps):
        yield


def _without(flag: ReconcileObstacle) -> Any:
    right = compute_reconcile.flags

    def flags(*given: Any) -> tuple[ReconcileObstacle, ...]:
        return tuple(each for each in right(*given) if each is not flag)

    return mock.patch.object(compute_reconcile, "flags", flags)


@contextmanager
def compacted_kept() -> Iterator[None]:
    """Keep a dataflow that is no longer readable at the new client's as_of."""
    with _without(ReconcileObstacle.COMPACTED):
        yield


@contextmanager
def other_imports_kept() -> Iterator[None]:
    """Keep a dataflow that reads another shard."""
    with _without(ReconcileObstacle.IMPORTS):
        yield


@contextmanager
def answers_while_initializing() -> Iterator[None]:
    """Let a worker send frontiers to a client that has not completed its initialization."""
    muted = property(lambda self: not self.connected)
    with mock.patch.object(ComputeState, "muted", muted):
        yield


@contextmanager
def upper_of_another_shard() -> Iterator[None]:
    """Report the upper of another shard of the same id."""

    def upper(self: StorageTaskRunner, id: str, shape: Shape) -> Frontier | None:
        found = self._uppers.get(id)
        return None if found is None else found[1]

    with mock.patch.object(StorageTaskRunner, "upper", upper):
        yield


@contextmanager
def two_tasks_of_one() -> Iterator[None]:
    """Start a task while its object's former one is still stopping."""
    right = StorageTaskRunner._begin

    def begin(self: StorageTaskRunner, rendering: Any) -> list[e.Effect]:
        with mock.patch.object(self, "stopping", {}):
            return right(self, rendering)

    with (
        mock.patch.object(StorageTaskRunner, "_begin", begin),
        mock.patch.object(StorageTaskRunner, "validate"),
    ):
        yield


@contextmanager
def overtaken_look_up() -> Iterator[None]:
    """Answer a dropped object's look-up after its drop, and render the object."""
    right = DesiredState.drop

    def drop(self: DesiredState, *ids: str) -> Any:
        kept = {id: self._all[id] for id in ids if id in self._all and self._all[id].ticket}
        steps = [each for each in right(self, *ids) if not isinstance(each, e.CancelLookUp)]
        for id, pursuit in kept.items():
            self._last += 1
            pursuit.ticket, self._all[id] = self._last, pursuit
            self._tickets[self._last] = id
            steps.append(e.LookUp(self._last, pursuit.what, 0))  # type: ignore[arg-type]
        return steps

    with mock.patch.object(DesiredState, "drop", drop):
        yield


@contextmanager
def counted_twice() -> Iterator[None]:
    """Add measurements twice."""
    right = StatisticsSums.absorb

    def absorb(self: StatisticsSums, update: Any) -> None:
        right(self, update)
        right(self, update)

    with mock.patch.object(StatisticsSums, "absorb", absorb):
        yield


@contextmanager
def another_client_unseen() -> Iterator[None]:
    """Take the end of any client for the present one's."""
    right = ComputeState._client_lost

    def lost(self: ComputeState, event: Any) -> Any:
        return right(self, replace(event, nonce=self.nonce or event.nonce))

    with mock.patch.object(ComputeState, "_client_lost", lost):
        yield


@contextmanager
def never_forgotten() -> Iterator[None]:
    """Let a new object take over a dropped source's external resources with its id."""
    right = StorageTaskRunner._begin

    def begin(self: StorageTaskRunner, rendering: Any) -> list[e.Effect]:
        self._forgetting.pop(rendering.id, None)
        return right(self, rendering)

    with mock.patch.object(StorageTaskRunner, "_begin", begin):
        yield


@contextmanager
def forgotten_in_use() -> Iterator[None]:
    """Start a task while its predecessor's external resources are being removed."""

    def forget(self: StorageTaskRunner, what: Any) -> e.CleanUpSource:
        self._forgets += 1
        return e.CleanUpSource(-self._forgets, what)

    with mock.patch.object(StorageTaskRunner, "_forget", forget):
        yield


@contextmanager
def health_told_once() -> Iterator[None]:
    """Do not repeat to a new client the health that its predecessor was told."""
    with mock.patch.object(HealthBoard, "forget_told"):
        yield


@contextmanager
def held_by_a_former_read() -> Iterator[None]:
    """Let a finished read still hold back the compaction of its index."""

    def remove(self: PeekHolds, pending: Any) -> list[Any]:
        self.pending.remove(pending)
        return []

    with mock.patch.object(PeekHolds, "_remove", remove):
        yield


PLANTED: Final[dict[str, Callable[[], Any]]] = {
    plant.__name__: plant
    for plant in (
        drop_when_told,
        created_when_told,
        rendered_after_its_drop,
        late_commands_applied,
        late_commands_offered,
        compaction_of_another,
        furthest_upper_told,
        furthest_frontier_told,
        unmentioned_kept,
        update_of_anything,
        failure_of_all,
        reads_hold_nothing,
        stash_goes_to_anybody,
        proposals_not_counted,
        compacted_kept,
        other_imports_kept,
        answers_while_initializing,
        upper_of_another_shard,
        two_tasks_of_one,
        overtaken_look_up,
        counted_twice,
        another_client_unseen,
        never_forgotten,
        forgotten_in_use,
        health_told_once,
        held_by_a_former_read,
    )
}

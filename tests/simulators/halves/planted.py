"""Mutants: each leaves out one rule of the halves; see `mutants`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace

from actors.channel_adapter import NonceVerdict, StashRules
from actors.model.protocol.compute import CreateDataflow
from actors.model.protocol.internal import TaggedCommand
from actors.model.protocol.storage import FrontierUpper, SinkDescription
from actors.model.protocol.storage_internal import DropObjects, RunSinkDataflow, SuspendAndRestart
from actors.replica.cluster import partitioned
from actors.replica.cluster.partitioned import StoragePartitioned
from actors.replica.compute import reconciliation as compute_reconcile
from actors.replica.compute.pending_peeks import PeekHolds
from actors.replica.compute.reconciliation import ReconcileObstacle
from actors.replica.compute.state import ComputeState
from actors.replica.storage import events as e
from actors.replica.storage import reconciliation as storage_reconcile
from actors.replica.storage import state as storage_state
from actors.replica.storage.desired_state import DesiredState
from actors.replica.storage.health_board import HealthBoard
from actors.replica.storage.state import StorageState
from actors.replica.storage.task_statistics import StatisticsSums
from actors.replica.storage.tasks import StorageTaskRunner, UpperScope
from actors.runtime.progress import Frontier
from tests.simulators.mutants import Mutants

PLANTED: Final = Mutants()


@PLANTED.wraps(StorageState, "_drop")
def drop_when_told(right: Any, self: StorageState, id: str) -> Any:
    """Let a worker drop when its client says so, not at the drop's place in the one order."""
    effects = right(self, id)
    self.renderings.apply(self.next_index, DropObjects((id,)))
    return effects


@PLANTED.wraps(ComputeState, "_tagged")
def created_when_told(right: Any, self: ComputeState, event: TaggedCommand[Any]) -> Any:
    """Let worker 0 render a dataflow when its client creates it, the others when it is ordered."""
    effects = right(self, event)
    if effects and isinstance(event.command, CreateDataflow) and self.incoming is None:
        effects = [*effects, *self._create(event.command.dataflow)]
    return effects


@PLANTED.planted
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


@PLANTED.wraps(StorageState, "_tagged")
def late_commands_applied(right: Any, self: StorageState, event: TaggedCommand[Any]) -> Any:
    """Take commands of a former client of the storage half for the present one's."""
    return right(self, replace(event, nonce=self.client.nonce or event.nonce))


@PLANTED.wraps(ComputeState, "_tagged")
def late_commands_offered(right: Any, self: ComputeState, event: TaggedCommand[Any]) -> Any:
    """Propose commands of a former client of the compute half to the one order."""
    return right(self, replace(event, nonce=self._proposing_for or event.nonce))


@PLANTED.wraps(DesiredState, "allow")
def compaction_of_another(right: Any, self: DesiredState, id: str, frontier: Frontier) -> None:
    """Let the compaction of any object move the hold of every sink."""
    for each in self.running():
        right(self, each, frontier)


@PLANTED.replaces(StoragePartitioned, "_upper")
def furthest_upper_told(
    self: StoragePartitioned, part: int, response: FrontierUpper
) -> FrontierUpper | None:
    """Report an upper when the first worker has reported it."""
    found = self._object(part, response.id, "an upper")
    if response.upper <= found.reported:
        return None
    found.reported = response.upper
    return response


@PLANTED.planted
def furthest_frontier_told() -> Iterator[None]:
    """Report a frontier of the compute half when the first worker has reported it."""
    with mock.patch.object(partitioned, "min", max, create=True):
        yield


@PLANTED.planted
def unmentioned_kept() -> Iterator[None]:
    """Let a reconciliation keep the objects that the new client has not mentioned."""
    right = storage_reconcile.reconcile

    def reconcile(*given: Any) -> Any:
        return replace(right(*given), drop=())

    with mock.patch.object(storage_state, "reconcile", reconcile):
        yield


@PLANTED.planted
def update_of_anything() -> Iterator[None]:
    """Accept forbidden updates of an object."""
    with (
        mock.patch.object(storage_state, "refusal", return_value=None),
        mock.patch.object(storage_reconcile, "refusal", return_value=None),
    ):
        yield


@PLANTED.wraps(StorageState, "_restart")
def failure_of_all(right: Any, self: StorageState, number: int) -> Any:
    """Restart all objects of a worker when one of them is restarted."""
    effects = right(self, number)
    for other, task in self.tasks.running.items() if effects else ():
        if other != number:
            effects += self._propose(SuspendAndRestart(task.rendering.id, other, "beside"))
    return effects


@PLANTED.planted
def reads_hold_nothing() -> Iterator[None]:
    """Compact an index beyond the reads that wait for it."""

    def earliest(self: Any, number: int) -> None:
        return None

    with (
        mock.patch("actors.replica.compute.pending_peeks.PendingPeeks.earliest", earliest),
        mock.patch.object(PeekHolds, "validate"),
    ):
        yield


@PLANTED.wraps(StashRules, "judge")
def stash_goes_to_anybody(right: Any, self: StashRules, tagged: Any) -> Any:
    """Let an adapter pass on responses for a client that it has not served yet."""
    strange = tagged.nonce not in self._served and self.connected
    return NonceVerdict.FORWARD if strange else right(self, tagged)


@PLANTED.wraps(StorageState, "_steps")
def proposals_not_counted(right: Any, self: StorageState, steps: Sequence[Any]) -> Any:
    """Free a command's lane room when it was received, before its proposals are ordered."""
    before = self.proposed
    effects = right(self, steps)
    self.proposed = before
    return effects


def _without(flag: ReconcileObstacle) -> Any:
    right = compute_reconcile.flags

    def flags(*given: Any) -> tuple[ReconcileObstacle, ...]:
        return tuple(each for each in right(*given) if each is not flag)

    return mock.patch.object(compute_reconcile, "flags", flags)


@PLANTED.planted
def compacted_kept() -> Iterator[None]:
    """Keep a dataflow that is no longer readable at the new client's as_of."""
    with _without(ReconcileObstacle.COMPACTED):
        yield


@PLANTED.planted
def other_imports_kept() -> Iterator[None]:
    """Keep a dataflow that reads another shard."""
    with _without(ReconcileObstacle.IMPORTS):
        yield


@PLANTED.planted
def answers_while_initializing() -> Iterator[None]:
    """Let a worker send frontiers to a client that has not completed its initialization."""
    muted = property(lambda self: not self.connected)
    with mock.patch.object(ComputeState, "muted", muted):
        yield


@PLANTED.replaces(StorageTaskRunner, "upper")
def upper_of_another_shard(self: StorageTaskRunner, id: str, shape: UpperScope) -> Frontier | None:
    """Report the upper of another shard of the same id."""
    found = self._uppers.get(id)
    return None if found is None else found[1]


@PLANTED.planted
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


@PLANTED.wraps(DesiredState, "drop")
def overtaken_look_up(right: Any, self: DesiredState, *ids: str) -> Any:
    """Answer a dropped object's look-up after its drop, and render the object."""
    kept = {id: self._all[id] for id in ids if id in self._all and self._all[id].ticket}
    steps = [each for each in right(self, *ids) if not isinstance(each, e.CancelLookUp)]
    for id, desired in kept.items():
        self._last += 1
        desired.ticket, self._all[id] = self._last, desired
        self._tickets[self._last] = id
        steps.append(e.LookUp(self._last, desired.what, 0))  # type: ignore[arg-type]
    return steps


@PLANTED.wraps(StatisticsSums, "absorb")
def counted_twice(right: Any, self: StatisticsSums, update: Any) -> None:
    """Add measurements twice."""
    right(self, update)
    right(self, update)


@PLANTED.wraps(ComputeState, "_client_lost")
def another_client_unseen(right: Any, self: ComputeState, event: Any) -> Any:
    """Take the end of any client for the present one's."""
    return right(self, replace(event, nonce=self.nonce or event.nonce))


@PLANTED.wraps(StorageTaskRunner, "_begin")
def never_forgotten(right: Any, self: StorageTaskRunner, rendering: Any) -> Any:
    """Let a new object take over a dropped source's external resources with its id."""
    self._forgetting.pop(rendering.id, None)
    return right(self, rendering)


@PLANTED.replaces(StorageTaskRunner, "_forget")
def forgotten_in_use(self: StorageTaskRunner, what: Any) -> e.CleanUpSource:
    """Start a task while its predecessor's external resources are being removed."""
    self._forgets += 1
    return e.CleanUpSource(-self._forgets, what)


@PLANTED.planted
def health_told_once() -> Iterator[None]:
    """Do not repeat to a new client the health that its predecessor was told."""
    with mock.patch.object(HealthBoard, "forget_reported"):
        yield


@PLANTED.replaces(PeekHolds, "_remove")
def held_by_a_former_read(self: PeekHolds, pending: Any) -> list[Any]:
    """Let a finished read still hold back the compaction of its index."""
    self.pending.remove(pending)
    return []

"""The responses that clients must have received when all objects have advanced and all is
delivered.

Does not cover: rows and counts; the health of dataflows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.model.protocol import compute
from actors.replica.storage.renderings import owner_of
from actors.runtime.progress import EMPTY
from tests.simulators.halves.checkers import KINDS, require
from tests.simulators.halves.clients import ComputeClient, StorageClient
from tests.simulators.halves.wishes import shapes, timeless

if TYPE_CHECKING:
    from tests.simulators.halves.run import HalvesWorld


def storage_is_told(world: HalvesWorld, client: StorageClient) -> None:
    """Check that reported uppers are those of the shards, and that each one-shot ingestion is
    answered."""
    running = world.wants_storage.running
    for what in client.wish.objects.values():
        here = {} if what.id not in running else shapes(running[what.id])
        for id_, shape in shapes(what).items():
            if here.get(id_) == shape:
                durable, told = world.outside.durable.get(shape, 0), client.told.get(id_, 0)
                if durable < EMPTY or shape[0] != "remap":  # it ends with its exports
                    require(
                        told == durable, "told", "{} below {}, not below {}", id_, told, durable
                    )
    unanswered = client.wish.oneshots.keys() - client.staged.keys()
    require(not unanswered, "told", "{} have no answer", sorted(unanswered))


def health_is_told(world: HalvesWorld, client: StorageClient) -> None:
    """Check that the latest status of an object is its owner's."""
    running = world.wants_storage.running
    for what in client.wish.objects.values():
        if timeless(running[what.id]) != timeless(what):
            continue  # the update was refused, which its status reports
        owner = world.nodes[owner_of(what.id, len(world.nodes))]
        for id_ in shapes(what):
            shown, told = owner.storage.health.shown(id_), client.statuses.get(id_)
            seen = None if shown is None else (shown.status, shown.error)
            right = told is not None and (told.status, told.error) == seen
            require(right, "told", "{} is {}, told is {}", id_, seen, told)


def compute_is_told(world: HalvesWorld, client: ComputeClient) -> None:
    """Check that every dataflow is reported up to the present time, and that reads and copies are
    answered."""
    require(not client.unanswered, "told", "reads {} have no answer", list(client.unanswered))
    clock = world.outside.clock
    for id_, export in client.exports.items():
        if isinstance(export, compute.CopyToExport):
            require(id_ in client.copied, "told", "copy {} has no answer", id_)
        elif isinstance(export, compute.SubscribeExport):
            far = client.emitted.get(id_, 0)
            require(far > clock, "told", "subscribe {} is told to {}, it is {}", id_, far, clock)
        else:
            told = [client.told.get((id_, kind), 0) for kind in KINDS]
            require(min(told) == clock, "told", "{} is told at {}, it is at {}", id_, told, clock)

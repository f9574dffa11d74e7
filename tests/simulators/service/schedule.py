"""Schedules of a run: operations of clients and of the operator, and faults, all from one seed.

A seed has several streams of randomness: the order of the loop, the workload, the faults, the
rivals, the replicas, the source, both halves. A `ClusterSchedule` holds the draws of all but the
first, as plain lists: a removed entry leaves all others unchanged, and the order's stream goes on
by itself.
"""

from __future__ import annotations

import random
from typing import Any, Final

import msgspec

from tests.simulators.service.faults import (
    CRASH,
    CRASH_AFTER,
    DELAY,
    DISCONNECT,
    FAIL,
    HANG,
    KILL,
    LOST,
    LOST_ANSWER,
    InjectedFault,
)

OPERATOR: Final = -1
"""Client number of the operator, who restarts and kills the service and crashes replicas."""
RIVAL: Final = -2
"""Client number of the first raw client of the cluster; others follow downwards."""
STORAGE_RIVAL: Final = -50
"""Client number of the first raw client of the storage half; others follow downwards."""

TABLES: Final = ("a", "b")


class ViewKind(msgspec.Struct, frozen=True):
    """A view that a run may make; `queries` computes its expected contents."""

    name: str
    sql: str
    reads: tuple[str, ...]


VIEWS: Final = (
    ViewKind("big", "SELECT id, k, v FROM a WHERE v % 3 > 0", ("a",)),
    ViewKind("by_k", "SELECT k, count(*) AS n, sum(v) AS s FROM a GROUP BY k", ("a",)),
    ViewKind("joined", "SELECT a.id, a.v, b.v AS w FROM a JOIN b ON a.k = b.k", ("a", "b")),
    ViewKind(
        "by_w", "SELECT b.v AS w, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY b.v", ("a", "b")
    ),
    ViewKind("busy", "SELECT k, n FROM by_k WHERE n > 1", ("by_k",)),
)


SOURCE: Final = "numbers"
"""Name of a source that counts, and of the table that it fills."""
SOURCE_EVENTS: Final = 250
SOURCE_STRIDE: Final = 7
"""One of so many seeds has a source."""
SOURCE_VIEWS: Final = (
    ViewKind("odds", "SELECT counter FROM numbers WHERE counter % 2 = 1", (SOURCE,)),
    ViewKind("sized", "SELECT a.k, count(*) AS n FROM numbers JOIN a ON numbers.counter = a.id "
        "GROUP BY a.k", ("a", SOURCE)),
    ViewKind("paired", "SELECT a.id, a.v FROM a JOIN numbers ON a.id = numbers.counter",
        ("a", SOURCE)),
)  # fmt: skip
"""Views on the source's table, in runs with a source only."""
WITHOUT_TABLES: Final = frozenset({SOURCE, "odds"})
"""Objects of runs with a source that read no table."""


DRAWN_SHARE: Final = 0.5
"""Share of seeds with drawn settings; the others keep the settings that found most mutants."""


class ClientOperation(msgspec.Struct, frozen=True):
    """Client `client` waits `pause_ms` and does `kind` to `name`."""

    client: int
    pause_ms: int
    kind: str
    name: str = ""
    number: int = 0
    """Number of rows, index of an earlier time, or pause, by the kind."""


class ClusterSetting(msgspec.Struct, frozen=True):
    """The settings that a seed draws."""

    workers: int = 1
    inline: bool = True
    decoded: bool = True
    retain_history_ms: int = 60_000
    batches_max: int = 4
    keyed: bool = False
    stash: bool = False
    """True if almost every read goes by the stash."""
    replicas: int = 1
    standby_ms: int = 1_000
    source_rate: int = 0
    """Events per second; 0: no source, and no storage half."""
    window: int = 1_024
    """Most commands of one half that may be under way."""
    copies: bool = False
    """True if files are copied into tables, in small parts."""
    drawn: bool = False
    """True if all other thresholds are drawn from the seed (`drawn_settings`), too."""
    wired: bool = False
    """True if the controller speaks to its replicas over wires, as to other processes."""


class ClusterSchedule(msgspec.Struct, frozen=True):
    """A whole run."""

    seed: int
    setting: ClusterSetting
    operations: tuple[ClientOperation, ...]
    faults: tuple[InjectedFault, ...]


def draw(seed: int) -> ClusterSchedule:
    """Return the schedule of a seed."""
    work = random.Random(f"workload {seed}")
    setting = ClusterSetting(
        workers=work.choice((1, 1, 1, 2, 2, 3)),
        inline=work.random() < 0.7,
        decoded=work.random() < 0.6,
        retain_history_ms=work.choice((50, 400, 60_000)),
        batches_max=work.choice((2, 3, 6)),
        keyed=work.random() < 0.3,
        stash=seed % 8 == 4,  # not drawn: a draw would change all later draws of the seed
    )
    found = _faults(seed)
    setting, aimed = _aimed(seed, setting)
    found.update(aimed)
    setting, visits, theirs = _rivals(seed, setting)
    found.update(theirs)
    faults = sorted(found.values(), key=lambda fault: (fault.site, fault.at))
    setting, operations = _replicas(seed, setting, [*_operations(work), *visits])
    setting, operations, more = _source(seed, setting, operations)
    if setting.source_rate:
        setting, operations, others = _halves(seed, setting, operations)
        more = [*{(fault.site, fault.at): fault for fault in (*more, *others)}.values()]
    setting, operations = _copies(seed, setting, operations)
    drawn = random.Random(f"settings {seed}").random() < DRAWN_SHARE
    # Not drawn: those seeds that find planted bugs stay what they are.
    setting = msgspec.structs.replace(setting, drawn=drawn, wired=seed % 7 == 2)
    return ClusterSchedule(seed, setting, tuple(operations), (*faults, *more))


def has_source(seed: int) -> bool:
    """Return whether the runs of a seed have a source, and so a storage half at work."""
    return seed % SOURCE_STRIDE == 5


_WORK: Final = (
    ("insert", 10),
    ("delete", 5),
    ("update", 2),
    ("both", 2),
    ("peek", 6),
    ("peek at", 4),
    ("wait", 1),
    ("subscribe", 3),
    ("reconnect", 2),
    ("create view", 1),
    ("drop view", 1),
    ("index", 1),
)


def _operations(work: random.Random) -> list[ClientOperation]:
    chosen = [view for view in VIEWS if work.random() < 0.25]
    if work.random() < 0.9 and not chosen:
        chosen = [work.choice(VIEWS[:4])]
    first = [view.name for view in VIEWS if _wanted(view.name, chosen)]
    found = [ClientOperation(0, 0, "create view", name) for name in first]
    clients = work.choice((1, 2, 3))
    kinds, weights = zip(*_WORK, strict=True)
    for _ in range(work.randrange(4, 15)):
        client = work.randrange(clients)
        kind = work.choices(kinds, weights)[0]
        name = work.choice((*TABLES, "a", *first)) if kind in _READS else work.choice(TABLES)
        if kind in ("create view", "drop view"):
            name = work.choice(VIEWS).name
        elif kind == "index":
            name = work.choice(first or ["a"])
        pause = work.choice((0, 0, 1, 5, 20, 60, 300))
        found.append(ClientOperation(client, pause, kind, name, work.randrange(1, 6)))
    for _ in range(work.choice((0, 0, 0, 1, 1, 2))):
        kind = work.choice(("restart", "kill", "kill"))
        found.append(ClientOperation(OPERATOR, work.choice((5, 30, 100, 400)), kind, "", 20))
    return found


_READS: Final = ("peek", "peek at", "wait", "subscribe")


def _wanted(name: str, chosen: list[ViewKind]) -> bool:
    return any(view.name == name or name in view.reads for view in chosen)


_SITES: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "consensus.set": (80, (FAIL, LOST, LOST_ANSWER, HANG, CRASH, CRASH_AFTER, DELAY, DELAY)),
    "consensus.head": (40, (FAIL, HANG, DELAY)),
    "blob.set": (40, (FAIL, LOST, LOST_ANSWER, HANG, CRASH, CRASH_AFTER, DELAY)),
    "blob.get": (30, (FAIL, LOST, HANG, CRASH, DELAY, DELAY)),
    "blob.delete": (20, (FAIL, LOST, LOST_ANSWER, DELAY, CRASH, CRASH_AFTER)),
    "blob.list": (6, (FAIL, DELAY)),
    "link.up": (40, (DISCONNECT, DELAY, DELAY)),
    "link.down": (60, (DISCONNECT, DELAY, DELAY)),
    "replica.up": (60, (DISCONNECT, DELAY, DELAY)),
    "replica.down": (100, (DISCONNECT, DISCONNECT, DELAY, DELAY)),
    "replica.close": (3, (DELAY,)),
    "adapter": (150, (DELAY,)),
    "engine": (30, (DELAY, DELAY, KILL)),
}
"""Site → the approximate number of its operations in a run, and the faults that may strike
there."""

_DELAYS_MS: Final = (1, 2, 5, 10, 30, 100, 400)


def _faults(seed: int) -> dict[tuple[str, int], InjectedFault]:
    """Return faults at some sites only, so that each kind of fault is also seen alone."""
    dice = random.Random(f"faults {seed}")
    if dice.random() < 0.1:
        return {}
    sites = [site for site in _SITES if dice.random() < 0.4]
    found: dict[tuple[str, int], InjectedFault] = {}
    crashes = 0
    for _ in range(dice.choice((1, 3, 6, 12, 24))):
        if not sites:
            break
        site = dice.choice(sites)
        length, kinds = _SITES[site]
        kind = dice.choice(kinds)
        delay = dice.choice(_DELAYS_MS)
        if kind == HANG:
            delay = dice.choice((1_000, 4_000))
        # Early operations are more likely: those of a start are the basis of all others.
        at = 1 + min(dice.randrange(length), dice.randrange(2 * length))
        if dice.random() < 0.2:
            at = dice.randrange(1, 13)
        if kind in (CRASH, CRASH_AFTER):
            crashes += 1
            if crashes > 2:
                continue
        found[site, at] = InjectedFault(site, at, kind, delay)
        if dice.random() < 0.2 and kind not in (CRASH, CRASH_AFTER, HANG):
            for more in range(1, dice.randrange(2, 8)):  # several operations in a row fail
                found[site, at + more] = InjectedFault(site, at + more, kind, delay)
    return found


def _aimed(
    seed: int, setting: ClusterSetting
) -> tuple[ClusterSetting, dict[tuple[str, int], InjectedFault]]:
    """Aim some seeds at combinations of faults that chance alone seldom draws."""
    dice = random.Random(f"joint {seed}")
    chance = dice.random()
    faults: list[InjectedFault] = []
    if chance < 0.15:
        setting = msgspec.structs.replace(setting, workers=dice.choice((2, 2, 3)))
        faults = _connections(dice)
    elif chance < 0.3:
        setting = msgspec.structs.replace(setting, inline=False, decoded=False, batches_max=2)
        faults = _slow_reads(dice)
    return setting, {(fault.site, fault.at): fault for fault in faults}


def _connections(dice: random.Random) -> list[InjectedFault]:
    """Return faults that break the cluster's connection, show its successor late to some adapters,
    and deliver the workers' responses to its predecessor later still."""
    found = []
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(5, 60)
        found.append(InjectedFault("replica.up", at, DISCONNECT))
        if dice.random() < 0.6:  # the successor's history comes late
            found.append(InjectedFault("replica.up", at + dice.randrange(2, 6), DELAY, 30))
    found += [
        InjectedFault("connect", at, DELAY, dice.choice((1, 5, 30, 100)))
        for at in range(1, 13)
        if dice.random() < 0.4
    ]
    for _ in range(dice.randrange(1, 4)):
        at, delay = dice.randrange(1, 100), dice.choice((2, 10, 30))
        length = dice.randrange(1, 40)
        found += [InjectedFault("worker.up", at + more, DELAY, delay) for more in range(length)]
    return found


def _slow_reads(dice: random.Random) -> list[InjectedFault]:
    """Return faults that read parts so slowly that these are compacted, and deleted, meanwhile."""
    at = dice.randrange(1, 30)
    return [
        InjectedFault("blob.get", at + more, HANG, dice.choice((100, 300, 1_000)))
        for more in range(dice.randrange(1, 12))
    ]


_VISITS: Final = (
    ("replay", 5),
    ("usurp", 2),
    ("stall", 3),
    ("greet", 1),
    ("misfit", 1),
    ("used nonce", 2),
)


_RIVAL_SITES: Final = (
    ("rival.up", (DISCONNECT, DELAY)),
    ("rival.down", (DISCONNECT, DELAY)),
    ("replica.up", (DELAY,)),  # the controller comes back slowly
    ("connect", (DELAY,)),
    ("worker.up", (DELAY,)),
)


def _rivals(
    seed: int, setting: ClusterSetting
) -> tuple[ClusterSetting, list[ClientOperation], dict[tuple[str, int], InjectedFault]]:
    """Add raw clients that displace the controller and one another, and more workers, to some
    seeds, by a stream of their own, so that other seeds are unchanged."""
    dice = random.Random(f"rivals {seed}")
    if dice.random() < 0.15:
        setting = msgspec.structs.replace(setting, workers=dice.choice((4, 5)))
    visits: list[ClientOperation] = []
    faults: list[InjectedFault] = []
    if dice.random() < 0.35:
        kinds, weights = zip(*_VISITS, strict=True)
        for rival in range(dice.choice((1, 1, 2, 3))):
            for _ in range(dice.randrange(1, 5)):
                pause = dice.choice((0, 1, 5, 20, 60, 300))
                kind = dice.choices(kinds, weights)[0]
                visits.append(ClientOperation(RIVAL - rival, pause, kind, "", dice.randrange(1, 7)))
        for _ in range(dice.choice((0, 1, 3, 8, 16))):
            site, kinds_of = dice.choice(_RIVAL_SITES)
            at, delay = dice.randrange(1, 60), dice.choice(_DELAYS_MS)
            faults.append(InjectedFault(site, at, dice.choice(kinds_of), delay))
    return setting, visits, {(fault.site, fault.at): fault for fault in faults}


def _replicas(
    seed: int, setting: ClusterSetting, operations: list[ClientOperation]
) -> tuple[ClusterSetting, list[ClientOperation]]:
    """Add several replicas, which crash one by one, to some seeds, by a stream of their own."""
    dice = random.Random(f"number of replicas {seed}")
    if dice.random() >= 0.15:
        return setting, operations
    setting = msgspec.structs.replace(
        setting, replicas=dice.choice((2, 2, 3)), standby_ms=dice.choice((5, 50, 400))
    )
    # A rebuilt replica has forgotten the nonces that were used.
    operations = [each for each in operations if each.kind != "used nonce"]
    for _ in range(dice.choice((1, 3, 6))):
        name, pause = f"r{dice.randrange(setting.replicas) + 1}", dice.choice((10, 60, 100, 200))
        crash = ClientOperation(OPERATOR, pause, "crash", name, dice.randrange(1, 20))
        operations.insert(dice.randrange(len(operations) + 1), crash)
    return setting, operations


_SOURCE_SITES: Final = (
    ("storage.up", (DISCONNECT, DELAY)),
    ("storage.down", (DISCONNECT, DELAY)),
    ("storage.adapter", (DELAY,)),
    ("storage.connect", (DELAY,)),
    ("storage.worker.up", (DELAY,)),
)


def _source(
    seed: int, setting: ClusterSetting, operations: list[ClientOperation]
) -> tuple[ClusterSetting, list[ClientOperation], list[InjectedFault]]:
    """Add a source, views on it, and faults of the storage half's connection, to every seventh
    seed, by a stream of their own."""
    dice = random.Random(f"source {seed}")
    if not has_source(seed):
        return setting, operations, []
    setting = msgspec.structs.replace(setting, source_rate=dice.choice((20, 200, 2_000)))
    made = [ClientOperation(0, dice.choice((0, 0, 20)), "create source", SOURCE)]
    chosen = [view.name for view in SOURCE_VIEWS if dice.random() < 0.5]
    made += [ClientOperation(0, dice.choice((0, 30)), "create view", name) for name in chosen]
    for _ in range(dice.randrange(2, 8)):
        kind = dice.choice(("peek", "peek", "peek at", "subscribe", "wait"))
        made.append(
            ClientOperation(0, dice.choice((0, 20, 100)), kind, dice.choice((SOURCE, *chosen)), 1)
        )
    if dice.random() < 0.3:
        made.append(ClientOperation(0, dice.choice((0, 60)), "drop source", SOURCE))
        made.append(ClientOperation(0, dice.choice((0, 60)), "create source", SOURCE))
    growing = random.Random(f"further columns {seed}")
    for number in range(2, 2 + growing.choice((0, 0, 1, 2, 3))):
        pause_ms = growing.choice((0, 20, 100))
        added = ClientOperation(0, pause_ms, "add column", SOURCE, number)
        made.insert(growing.randrange(1, len(made) + 1), added)
    at = dice.randrange(len(operations) + 1)
    faults: dict[tuple[str, int], InjectedFault] = {}
    for _ in range(dice.choice((0, 1, 4, 10))):
        site, kinds = dice.choice(_SOURCE_SITES)
        where, delay = dice.randrange(1, 40), dice.choice(_DELAYS_MS)
        faults[site, where] = InjectedFault(site, where, dice.choice(kinds), delay)
    return setting, [*operations[:at], *made, *operations[at:]], list(faults.values())


_STORAGE_VISITS: Final = (
    ("storage replay", 4),
    ("storage usurp", 2),
    ("storage part", 2),
    ("storage stall", 2),
    ("storage greet", 1),
    ("storage alter", 3),
    ("storage drop", 3),
    ("storage used nonce", 1),
)
_HALVES_SITES: Final = (
    ("storage.rival.up", (DISCONNECT, DELAY)),
    ("storage.rival.down", (DISCONNECT, DELAY)),
    ("storage.up", (DELAY,)),  # the controller comes back slowly
    ("storage.adapter", (DELAY,)),
    ("storage.connect", (DELAY,)),
    ("storage.worker.up", (DELAY,)),
    ("source.open", (FAIL, DELAY)),
    ("source.next", (FAIL, FAIL, DELAY)),
    ("sink.open", (FAIL, DELAY)),
    ("sink.commit", (FAIL, LOST_ANSWER, DELAY)),
)


def _halves(
    seed: int, setting: ClusterSetting, operations: list[ClientOperation]
) -> tuple[ClusterSetting, list[ClientOperation], list[InjectedFault]]:
    """Add raw clients that displace the controller on the storage half's connection, sinks, and
    external systems that fail, to seeds with a source, by a stream of their own."""
    dice = random.Random(f"halves {seed}")
    setting = msgspec.structs.replace(setting, window=dice.choice((1, 2, 32)))
    operations = list(operations)
    made = {each.name for each in operations if each.kind == "create view"}
    for on in sorted({SOURCE, "a", *made}):
        if dice.random() >= 0.4:
            continue
        created = ClientOperation(0, dice.choice((0, 20, 60)), "create sink", on)
        first = max(
            (i for i, each in enumerate(operations) if each.name == on and "create" in each.kind),
            default=-1,
        )
        at = dice.randrange(first + 1, len(operations) + 1)
        operations.insert(at, created)
        if dice.random() < 0.3:
            at = dice.randrange(at + 1, len(operations) + 1)
            operations.insert(at, ClientOperation(0, dice.choice((0, 60)), "drop sink", on))
    faults: list[InjectedFault] = []
    if dice.random() < 0.7:
        kinds, weights = zip(*_STORAGE_VISITS, strict=True)
        for rival in range(dice.choice((1, 1, 2, 3))):
            for _ in range(dice.randrange(1, 5)):
                kind, number = dice.choices(kinds, weights)[0], dice.randrange(1, 7)
                pause = dice.choice((0, 5, 20, 60, 300))
                # A rebuilt replica has forgotten the nonces that were used.
                if setting.replicas == 1 or kind != "storage used nonce":
                    operations.append(
                        ClientOperation(STORAGE_RIVAL - rival, pause, kind, "", number)
                    )
    for _ in range(dice.choice((0, 1, 3, 8, 16))):
        site, kinds_of = dice.choice(_HALVES_SITES)
        at, delay = dice.randrange(1, 60), dice.choice(_DELAYS_MS)
        if site.endswith("open"):
            at = dice.randrange(1, 10)
        faults.append(InjectedFault(site, at, dice.choice(kinds_of), delay))
    if dice.random() < 0.4:  # look-ups answer when their object is dropped already
        at, delay = dice.randrange(1, 30), dice.choice((5, 30, 100))
        faults += [InjectedFault("persist.state", at + more, DELAY, delay) for more in range(20)]
    if dice.random() < 0.3:  # only the sinks' uncommitted batches hold back the since
        setting = msgspec.structs.replace(setting, retain_history_ms=50)
        at, delay = dice.randrange(1, 20), dice.choice((100, 400))
        faults += [InjectedFault("sink.commit", at + more, DELAY, delay) for more in range(6)]
    return setting, operations, faults


def _copies(
    seed: int, setting: ClusterSetting, operations: list[ClientOperation]
) -> tuple[ClusterSetting, list[ClientOperation]]:
    """Add copies from files, to every fifth of the seeds with a source, by a stream of their
    own."""
    if not setting.source_rate or seed % 5 != 0:
        return setting, operations
    dice = random.Random(f"copies {seed}")
    clients = sorted({each.client for each in operations if each.client >= 0})
    operations = list(operations)
    for _ in range(dice.randrange(2, 9)):
        pause, count = dice.choice((0, 1, 5, 20, 100)), dice.choice((0, 1, 3, 8, 20))
        kind = dice.choice(("copy", "copy", "copy again", "leave a copy"))
        made = ClientOperation(dice.choice(clients), pause, kind, dice.choice(TABLES), count)
        operations.insert(dice.randrange(len(operations) + 1), made)
    return msgspec.structs.replace(setting, copies=True), operations


def describe(item: Any) -> str:
    """Return one line for an operation or a fault."""
    if isinstance(item, InjectedFault):
        delay = f" {item.delay_ms} ms" if item.delay_ms else ""
        return f"fault: {item.site} no. {item.at}: {item.kind}{delay}"
    who = "operator" if item.client == OPERATOR else f"client {item.client}"
    if item.client <= STORAGE_RIVAL:
        who = f"storage rival {STORAGE_RIVAL - item.client}"
    elif item.client <= RIVAL:
        who = f"rival {RIVAL - item.client}"
    return f"{who}: after {item.pause_ms} ms: {item.kind} {item.name} {item.number or ''}".rstrip()

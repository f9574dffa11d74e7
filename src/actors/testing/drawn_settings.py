"""Settings drawn from a seed, so that small data take the paths of large data.

Each setting that acts as a threshold (`actors.runtime.threshold_probes`) keeps its default in
`DEFAULT_SHARE` of all draws; otherwise it takes one of a few small values, so small that ten rows
exceed it. Each setting draws from its own random stream, so that adding a setting leaves the draws
of all others unchanged. A value that contradicts those drawn before it (`Settings.check`) is
skipped. The constants by which a module chooses between two ways to one result, or cuts data into
pieces (`SMALL_CONSTANTS`), are drawn in the same way, only for this process.

The same seed draws the same settings: the seed alone replays a run.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import msgspec

from actors.durable.arrangement.arrangement import ArrangementLimits
from actors.runtime.errors import BadSettings
from actors.runtime.settings import Settings
from actors.testing.patience import PATIENCE_MS

SEED_VARIABLE: Final = "DRAWN_SETTINGS_SEED"
DEFAULT_SHARE: Final = 0.4

SMALL_VALUES: Final[Mapping[str, tuple[int, ...]]] = {
    # The inner limits come first: a small outer one would contradict a default inner one.
    "inline_part_bytes_max": (1, 700, 4_096),
    "inline_bytes_per_shard_max": (1, 3_000, 20_000),
    "state_bytes_max": (2_000, 8_000, 40_000),
    "part_bytes_target": (600, 3_000, 50_000),
    "part_list_parts_min": (1, 2, 4),
    "part_statistics_bytes_max": (1, 30, 120),
    "decoded_parts_bytes_max": (1, 20_000, 200_000),
    "batches_per_shard_max": (2, 3, 6),
    "filter_audit_one_in": (1, 2),
    "hydration_chunk_bytes": (1, 5_000),
    "hydrations_max": (1, 2),
    "engine_inline_bytes_max": (1, 2_000),
    "lookup_rows_max": (1, 5, 50),
    "hidden_rows_whole_max": (1, 5),
    "step_pairs_max": (1, 20),
    "eager_aggregation_rows_min": (1,),
    "inflight_bytes_per_dataflow_max": (1, 1_500, 20_000),
    "described_in_flight_max": (1, 2),
    "fetches_in_flight_max": (1, 2),
    "arrangement_lag_bytes_max": (1, 2_000),
    "inline_bytes_max": (1, 1_500, 6_000),
    "result_bytes_max": (64 * 1024,),
    "subscribe_inflight_bytes_max": (1, 4_000),
    "commands_in_flight_max": (1, 4),
    "responses_in_flight_max": (4, 16),
    "engine_collected_bytes_max": (1, 20_000),
    "engine_plan_nodes_max": (1, 20, 60),
    "prepared_slot_bytes_max": (1, 3_000),
    "prepared_plans_max": (1, 4),
    "prepared_plans_per_dataflow_max": (1, 2),
    "source_inflight_bytes_max": (4_000, 50_000),
    "sink_bytes_max": (1, 2_000),
}
"""Values of settings far below their defaults."""

SMALL_CONSTANTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "durable.persist.part_lists.LOOP_BYTES_MAX": (1, 65),
    "durable.persist.part_store.LOOP_BYTES_MAX": (1, 65),
    "durable.persist.parts.ROW_GROUP_ROWS": (3, 131),
    "durable.persist.group_commit.SETS_MAX": (1, 8),
    "durable.persist.compaction.FILE_BUDGETS_MAX": (1,),
    "durable.persist.compaction.HASHED_ROWS": (16,),
    "durable.persist.part_filter.KEYS_MAX": (1, 8),
    "durable.arrangement.arrangement.DEFAULT_LIMITS": (
        ArrangementLimits(memory_run_bytes_max=300, memory_bytes_max=500, memory_runs_max=1),
        ArrangementLimits(memory_run_bytes_max=1_000, block_bytes=1_000),
        ArrangementLimits(memory_bytes_max=4_000, memory_runs_max=3, block_bytes=67_000),
    ),
    "durable.arrangement.gathered_updates.HELD_BYTES_MAX": (1_000, 8_000),
    "durable.arrangement.hashing.STRETCH_BYTES": (50, 1_000),
    "durable.arrangement.snapshot.RESIDENT_BYTES_MAX": (1, 67_000),
    "durable.arrangement.snapshot.SLICE_ROWS": (5, 65),
    "model.plan.updates.FEW_ROWS": (1, 8),
    "model.plan.updates.SAMPLE_ROWS": (1, 8),
    "model.plan.updates.SLICE_ROWS": (5, 65),
    "model.protocol.row_finishing.SORTED_ROWS_MIN": (1, 8),
    "engine.views.operators.SHARED_NODES_MAX": (4, 8),
    "engine.views.rule_top.RESERVE_ROWS": (1, 8),
    "connectors.sinks.delta.FILE_BYTES_TARGET": (2_000, 67_000),
    "connectors.sinks.delta_rewrite.FILE_BYTES_TARGET": (2_000, 67_000),
    "connectors.sinks.delta_rewrite.HELD_BYTES_MAX": (1, 33_000),
    "connectors.sinks.delta_rewrite.SMALL_FILES_MAX": (1, 8),
    "connectors.sinks.parquet.FILE_BYTES_TARGET": (2_000, 67_000),
    "connectors.sources.file_reading.PIECE_BYTES": (500, 8_000),
    "fetch_task.LOOP_ROWS_MAX": (1, 20),
    "replica.compute.peeks.POINT_ROWS_MAX": (1, 8),
    "replica.dataflow.engine.LOOP_ROWS_MAX": (1, 8),
    "replica.dataflow.held_changes.HELD_BYTES_MAX": (1, 8_000),
    "replica.dataflow.first_contents.PIECE_ROWS": (5, 500),
    "replica.dataflow.passthrough.SUMMED_BYTES_MAX": (1_000, 8_000),
    "replica.dataflow.state_lookups.DUE_BUCKETS_MAX": (1, 8),
    "replica.dataflow.view.QUIET_STEPS": (1,),
    "runtime.transport.connection.SLICE_BYTES": (500, 1_000),
    "runtime.transport.stream.SLICE_BYTES": (500, 1_000),
    "control.controller.reads.memory_reads.LOOP_KEYS_MAX": (1, 8),
    "control.controller.tables.commit.LOOP_BYTES_MAX": (1, 16),
    "control.controller.tables.table_arrangements.LOOP_ROWS_MAX": (1, 8),
    "control.controller.tables.table_arrangements.UNFED_ROWS_MAX": (1, 8),
    "control.controller.tables.table_writer.GROUP_WRITES_MAX": (1, 8),
    "doors.sql_session.offloading.LOOP_CHARACTERS_MAX": (1, 8),
}
"""Constants below `actors`, with values far below their own."""

COSTLY_SETTINGS: Final = frozenset(
    {
        "inflight_bytes_per_dataflow_max",
        "inline_bytes_max",
        "lookup_rows_max",
        "part_bytes_target",
        "source_inflight_bytes_max",
    }
)
"""Settings whose small values cost a file or a step per few rows, or a scan per step: with them,
thousands of rows take minutes."""

AS_GIVEN: Final = Settings()
DEADLINES: Final = ("peek_deadline_ms", "replace_deadline_ms", "disk_timeout_ms")
"""Settings that limit, in real time, how long to wait for something that is certain to come."""

ENGINE_SETTINGS: Final = frozenset(
    name for name in SMALL_VALUES if name.startswith(("engine_", "prepared_"))
)
"""Settings that an engine takes once, when it starts."""


def draw_settings(seed: object, base: Settings, kept: Collection[str] = ()) -> Settings:
    """Return `base` with settings drawn by `seed`: all of `SMALL_VALUES` but those in `kept`."""
    made = base
    for name, values in SMALL_VALUES.items():
        if name in kept:
            continue
        dice = random.Random(f"setting {name} {seed}")
        if dice.random() < DEFAULT_SHARE:
            continue
        candidate = msgspec.structs.replace(made, **{name: dice.choice(values)})
        try:
            candidate.check()
        except BadSettings:
            continue
        made = candidate
    return made


def draw_for_test(
    base: Settings, kept: Collection[str] = (), *, many_rows: bool = False
) -> Settings:
    """Return settings drawn as `draw_settings` does, seeded by the running test's name and the
    environment variable `SEED_VARIABLE` (0 if unset). Draw the constants as well, until
    `restore_constants`. `many_rows` leaves out the `COSTLY_SETTINGS` and the constants. Prints the
    draw to stderr, which pytest shows for a failure.

    Deadlines that `base` does not change become as long as a test waits: a disk or a machine may
    stall for longer than a user would wait.
    """
    seed = os.environ.get(SEED_VARIABLE, "0")
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if many_rows:
        kept = COSTLY_SETTINGS.union(kept)
    waits = {
        name: PATIENCE_MS for name in DEADLINES if getattr(base, name) == getattr(AS_GIVEN, name)
    }
    base = msgspec.structs.replace(base, **waits)
    made = draw_settings(f"{seed} {test}", base, kept)
    constants = {} if many_rows else draw_constants(f"{seed} {test}")
    use_constants(constants)
    text = drawn_text(base, made)
    print(f"{SEED_VARIABLE}={seed} {test}: {text}; {constants}", file=sys.stderr)
    return made


def drawn_text(base: Settings, drawn: Settings) -> str:
    """Return the settings of `drawn` that differ from `base`, in the form of ``--set``."""
    pairs = [
        f"{name}={getattr(drawn, name)}"
        for name in SMALL_VALUES
        if getattr(drawn, name) != getattr(base, name)
    ]
    return " ".join(pairs) or "all defaults"


# -- constants of this process ---------------------------------------------------------------------

_OWN_VALUES: Final[dict[str, Any]] = {}
"""The original values of the changed constants."""


def draw_constants(seed: object) -> dict[str, Any]:
    """Return the constants that `seed` draws, with their small values."""
    drawn = {}
    for name, values in SMALL_CONSTANTS.items():
        dice = random.Random(f"constant {name} {seed}")
        if dice.random() >= DEFAULT_SHARE:
            drawn[name] = dice.choice(values)
    return drawn


def use_constants(values: Mapping[str, Any]) -> None:
    """Set these constants of `SMALL_CONSTANTS` in this process, and reset all others."""
    restore_constants()
    for name, value in values.items():
        place, constant = _place_of(name)
        _OWN_VALUES[name] = getattr(place, constant)
        setattr(place, constant, value)


def restore_constants() -> None:
    """Reset all constants to their own values."""
    while _OWN_VALUES:
        name, value = _OWN_VALUES.popitem()
        setattr(*_place_of(name), value)


def _place_of(name: str) -> tuple[ModuleType, str]:
    module, _, constant = name.rpartition(".")
    return importlib.import_module(f"actors.{module}"), constant


@contextmanager
def constants_of(values: Mapping[str, Any]) -> Iterator[None]:
    """Use the constants while the block runs, as `use_constants` does, then reset all. Only for
    code that runs alone, such as a simulation."""
    use_constants(values)
    try:
        yield
    finally:
        restore_constants()

"""Settings drawn from a seed, so that small data take the paths of large data.

Each threshold (`actors.runtime.threshold_probes`) keeps its default in `DEFAULT_SHARE` of all
draws; else it takes one of a few small values, so small that ten rows lie beyond it. A setting
draws from a stream of its own, so that one more setting leaves the draws of all others unchanged;
and a value that contradicts those drawn before it (`Settings.check`) is left out.

The same seed draws the same settings: a run is replayed by its seed alone.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec

from actors.runtime.errors import BadSettings
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import KERNEL_LIMITS, use_kernel_limits
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

LEAST_LIMITS: Final[Mapping[str, int]] = {
    "arrangement_block_bytes": 1_000,
    "arrangement_memory_bytes": 500,
    "arrangement_run_bytes": 300,
    "compaction_hashed_rows": 16,
    "hashed_bytes": 50,
    "hydration_piece_rows": 5,
    "part_row_group_rows": 3,
    "sliced_rows": 5,
    "view_slice_rows": 5,
    "frame_slice_bytes": 500,
    "gathered_bytes": 1_000,
    "file_piece_bytes": 500,
    "sink_file_bytes": 2_000,
    "plan_shared_nodes": 4,
    "engine_relation_bytes": 2_000,
}
"""Least values of kernel limits whose smaller values cost far more than they reveal."""

COSTLY_SETTINGS: Final = frozenset(
    {
        "inflight_bytes_per_dataflow_max",
        "inline_bytes_max",
        "lookup_rows_max",
        "part_bytes_target",
        "source_inflight_bytes_max",
    }
)
"""Settings whose small values cost a file or a step for every few rows, or a scan for each step:
thousands of rows take minutes."""

AS_GIVEN: Final = Settings()
DEADLINES: Final = ("peek_deadline_ms", "replace_deadline_ms", "disk_timeout_ms")
"""Settings that bound, in real time, how long something may take that must come."""

ENGINE_SETTINGS: Final = frozenset(
    name for name in SMALL_VALUES if name.startswith(("engine_", "prepared_"))
)
"""Settings that an engine takes once, when it starts."""


def small_limits(name: str) -> tuple[int, ...]:
    """Return the small values of a kernel limit, ascending."""
    default, least = KERNEL_LIMITS[name].default, LEAST_LIMITS.get(name, 1)
    return tuple(sorted({min(default, max(least, each)) for each in (least, 8, default // 1_000)}))


def draw_settings(
    seed: object, base: Settings, kept: Collection[str] = (), *, limits: bool = True
) -> Settings:
    """Return `base` with thresholds drawn by `seed`: all of `SMALL_VALUES` but those in `kept`,
    and, with `limits`, the kernel limits."""
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
    if not limits:
        return made
    drawn = dict(base.kernel_limits)
    for name in KERNEL_LIMITS:
        dice = random.Random(f"limit {name} {seed}")
        if dice.random() >= DEFAULT_SHARE:
            drawn[name] = dice.choice(small_limits(name))
    made = msgspec.structs.replace(made, kernel_limits=drawn)
    made.check()
    return made


def draw_for_test(
    base: Settings, kept: Collection[str] = (), *, many_rows: bool = False
) -> Settings:
    """Return settings drawn as `draw_settings` does, seeded by the running test's name and the
    environment's `SEED_VARIABLE` (0 without). `many_rows`: without the `COSTLY_SETTINGS`, and
    without kernel limits. Prints the draw to stderr, which pytest shows of a failure.

    Deadlines that `base` leaves as they are become as long as a test waits: a disk or a machine may
    stand still for longer than a user would wait.
    """
    seed = os.environ.get(SEED_VARIABLE, "0")
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if many_rows:
        kept = COSTLY_SETTINGS.union(kept)
    waits = {
        name: PATIENCE_MS for name in DEADLINES if getattr(base, name) == getattr(AS_GIVEN, name)
    }
    base = msgspec.structs.replace(base, **waits)
    made = draw_settings(f"{seed} {test}", base, kept, limits=not many_rows)
    print(f"{SEED_VARIABLE}={seed} {test}: {drawn_text(base, made)}", file=sys.stderr)
    return made


def drawn_text(base: Settings, drawn: Settings) -> str:
    """Return the settings of `drawn` that differ from `base`, as they are given to ``--set``."""
    pairs = [
        f"{name}={getattr(drawn, name)}"
        for name in SMALL_VALUES
        if getattr(drawn, name) != getattr(base, name)
    ]
    pairs += [
        f"kernel_limits.{name}={value}"
        for name, value in sorted(drawn.kernel_limits.items())
        if value != base.kernel_limits.get(name)
    ]
    return " ".join(pairs) or "all as by default"


@contextmanager
def kernel_limits_of(settings: Settings) -> Iterator[None]:
    """Set this process's kernel limits to the settings' while the block runs, then restore them.
    Process-wide: only for code that runs alone, as a simulation does."""
    before = {name: each.limit for name, each in KERNEL_LIMITS.items()}
    use_kernel_limits(settings.kernel_limits)
    try:
        yield
    finally:
        use_kernel_limits(before)

"""Thresholds: every place where a size, a count or an age decides which path runs, and a count of
how often each side was taken.

A path that only large data take is never taken by small tests. So each such decision names its
threshold here, is made through it, and is counted: `docs/testing.md` lists the counts of the last
full test run, and a full run fails when a side was never taken. Tests draw small thresholds from
their seed (`actors.testing.drawn_settings`), and ten rows take every path that ten million take.

A `SettingThreshold` compares with a field of `Settings`. A `KernelLimit` belongs to a pure function
far below any settings (how many rows Python sums faster than Arrow does): its limit is one for the
process, which `use_kernel_limits` sets from the setting `kernel_limits`. No kernel limit changes a
result; it chooses between two ways to the same one.

Counts are in memory, or, when the environment variable `COUNTS_VARIABLE` names a folder, in a
mapped file of this process there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Final

COUNTS_VARIABLE: Final = "THRESHOLD_COUNTS_DIR"
COUNTS_SUFFIX: Final = ".counts"
COUNT_BYTES: Final = 8
"""Size of one count in a file, a native unsigned integer."""


class ThresholdProbe:
    """A named decision. `within` and `beyond` say what happens on its two sides."""

    __slots__ = ("beyond", "name", "place", "within")

    def __init__(self, name: str, within: str, beyond: str) -> None:
        self.name: Final = name
        self.within: Final = within
        self.beyond: Final = beyond
        self.place: Final = 2 * len(THRESHOLDS)
        """Index of its first count; the other side's is next to it."""
        THRESHOLDS.append(self)

    def crossed(self, beyond: bool) -> bool:
        """Count the side that is taken, and return whether it is the one beyond."""
        _counts[self.place + beyond] += 1
        return beyond


class SettingThreshold(ThresholdProbe):
    """A decision by a field of `Settings`, named `setting`."""

    __slots__ = ("setting",)

    def __init__(self, setting: str, within: str, beyond: str, *, decision: str = "") -> None:
        """Name the decision. `decision` tells apart several decisions by one setting."""
        super().__init__(f"{setting}: {decision}" if decision else setting, within, beyond)
        self.setting: Final = setting


class KernelLimit(ThresholdProbe):
    """A decision of a pure function by a limit of the process, an integer of at least 1."""

    __slots__ = ("default", "limit")

    def __init__(self, name: str, default: int, within: str, beyond: str) -> None:
        super().__init__(name, within, beyond)
        self.default: Final = default
        self.limit = default

    def exceeded_by(self, size: int) -> bool:
        """Count the side that `size` takes, and return whether it is greater than the limit."""
        beyond = size > self.limit
        _counts[self.place + beyond] += 1
        return beyond


THRESHOLDS: Final[list[ThresholdProbe]] = []
"""All thresholds, in the order of their counts."""

# -- persist ---------------------------------------------------------------------------------------

INLINE_PART: Final = SettingThreshold(
    "inline_part_bytes_max",
    "the updates are one part in the shard's document",
    "the updates are parts in blobs",
)
INLINE_ROOM: Final = SettingThreshold(
    "inline_bytes_per_shard_max",
    "the document has room for inline parts",
    "new parts go to blobs, however small",
)
INLINE_COMPACTION: Final = SettingThreshold(
    "inline_bytes_per_shard_max",
    "compaction leaves inline parts in the document",
    "compaction sends inline parts to a blob",
    decision="compaction",
)
STATE_RELIEF: Final = SettingThreshold(
    "state_bytes_max",
    "who appends goes on",
    "who appends compacts the shard first",
)
PART_COUNT: Final = SettingThreshold(
    "part_bytes_target",
    "updates beyond a document are one part",
    "they are many parts",
)
COMPACTION_SPILL: Final = SettingThreshold(
    "part_bytes_target",
    "a compaction merges in memory",
    "it spills to files",
    decision="compaction",
)
PART_LIST: Final = SettingThreshold(
    "part_list_parts_min",
    "the document describes a batch's parts",
    "a part list in a blob does",
)
PART_STATISTICS: Final = SettingThreshold(
    "part_statistics_bytes_max",
    "all columns of a part have statistics",
    "the longest ones are left out",
)
DECODED_ROOM: Final = SettingThreshold(
    "decoded_parts_bytes_max",
    "a decoded part is kept",
    "a decoded part is too large to be kept",
)
DECODED_EVICTION: Final = SettingThreshold(
    "decoded_parts_bytes_max",
    "all decoded parts stay",
    "the oldest are let go",
    decision="eviction",
)
BATCH_COUNT: Final = SettingThreshold(
    "batches_per_shard_max",
    "a shard's batches stay as they are",
    "its newest batches are merged",
)
FILTER_AUDIT: Final = SettingThreshold(
    "filter_audit_one_in",
    "a part that the filter leaves out is read, to prove the filter",
    "it is not read",
)
GROUP_COMMIT: Final = KernelLimit(
    "group_commit_sets", 256,
    "all sets that wait share a transaction",
    "some wait for the next one",
)  # fmt: skip
LOOP_BYTES: Final = KernelLimit(
    "loop_bytes", 64 * 1024,
    "parts and part lists are encoded and decoded on the event loop",
    "they are in a thread",
)  # fmt: skip
PARQUET_THREADS: Final = KernelLimit(
    "parquet_single_thread_bytes", (1 << 20) - 1,
    "a part is decoded by one thread",
    "by many",
)  # fmt: skip
PART_ROWS: Final = KernelLimit(
    "part_rows_few", 32,
    "Python looks at a part's times",
    "Arrow does",
)  # fmt: skip
ROW_GROUPS: Final = KernelLimit(
    "part_row_group_rows", 128 * 1024,
    "a part has one row group",
    "it has several, whose statistics are joined",
)  # fmt: skip
DOCUMENT_PACKING: Final = KernelLimit(
    "document_plain_bytes", 511,
    "a document is kept as it is",
    "it is compressed",
)  # fmt: skip
HASHED_ROWS: Final = KernelLimit(
    "compaction_hashed_rows", 16_384,
    "the rows of a compaction are hashed whole",
    "they are hashed in pieces",
)  # fmt: skip
SPILLED_FILE: Final = KernelLimit(
    "compaction_file_budgets", 4,
    "a spilled file is merged whole",
    "it is cut again by hash",
)  # fmt: skip
FILTER_KEYS: Final = KernelLimit(
    "filter_keys", 64,
    "a peek's keys leave out parts",
    "so many keys do not",
)  # fmt: skip
BUCKET_PIECE: Final = ThresholdProbe(
    "bucket object written",  # S3 takes no piece that is much smaller, so this is no setting
    "an object of a bucket is written by one request",
    "it is written in pieces",
)
BUCKET_READ: Final = ThresholdProbe(
    "bucket object read",
    "an object of a bucket is read by one request",
    "it is read in pieces",
)

# -- rows and arrangements -------------------------------------------------------------------------

FEW_ROWS: Final = KernelLimit(
    "updates_few_rows", 256,
    "Python sums equal rows",
    "Arrow does",
)  # fmt: skip
SAMPLED_ROWS: Final = KernelLimit(
    "updates_sampled_rows", 8_191,
    "a step's changes are summed up before anything is looked up",
    "a sample of them tells whether to sum them up",
)  # fmt: skip
SHORT_STREAM: Final = KernelLimit(
    "updates_short_stream_bytes", 16 * 1024,
    "an Arrow stream is tried as a short one",
    "it is opened by Arrow",
)  # fmt: skip
HASHED_BYTES: Final = KernelLimit(
    "hashed_bytes", 1 << 20,
    "texts are hashed at once",
    "they are hashed in stretches",
)  # fmt: skip
POINT_TEXT: Final = KernelLimit(
    "point_text_bytes", 256,
    "a key that holds a text is looked up alone",
    "so long a text takes the way of many keys",
)  # fmt: skip
GROUPED_REST: Final = KernelLimit(
    "view_rest_rows", 512,
    "rows that share a hash are summed together",
    "those whose hash stands alone are set apart first",
)  # fmt: skip
VIEW_SLICE: Final = KernelLimit(
    "view_slice_rows", 65_536,
    "an arrangement is read in one slice",
    "it is read in slices",
)  # fmt: skip
RESIDENT_BYTES: Final = KernelLimit(
    "view_resident_bytes", 64 << 20,
    "what was read of a mapped run stays in memory",
    "it is let go as the reader passes",
)  # fmt: skip
RUN_IN_MEMORY: Final = KernelLimit(
    "arrangement_run_bytes", 1 << 20,
    "a run of an arrangement is in memory",
    "it is a file",
)  # fmt: skip
ARRANGEMENT_MEMORY: Final = KernelLimit(
    "arrangement_memory_bytes", 4 << 20,
    "an arrangement's memory has room for one more run",
    "the run is a file, since all of them take too much",
)  # fmt: skip
ARRANGEMENT_RUNS: Final = KernelLimit(
    "arrangement_memory_runs", 8,
    "an insert leaves merging to maintenance",
    "an insert merges small runs itself",
)  # fmt: skip
MERGED_BLOCK: Final = KernelLimit(
    "arrangement_block_bytes", 64 << 20,
    "a merge makes one block",
    "it makes several",
)  # fmt: skip
GATHERED_BYTES: Final = KernelLimit(
    "gathered_bytes", 8 << 20,
    "contents that are gathered stay in memory",
    "they are spilled",
)  # fmt: skip
SLICED_ROWS: Final = KernelLimit(
    "sliced_rows", 65_536,
    "a part is looked at whole",
    "it is looked at in slices",
)  # fmt: skip

# -- dataflows -------------------------------------------------------------------------------------

HYDRATION_CHUNK: Final = SettingThreshold(
    "hydration_chunk_bytes",
    "the first contents of an additive view are computed at once",
    "they are computed in chunks",
)
HYDRATION_PIECE: Final = KernelLimit(
    "hydration_piece_rows", 500_000,
    "a file of the engine's answer is written again in one piece",
    "it is in several",
)  # fmt: skip
HYDRATION_QUEUE: Final = SettingThreshold(
    "hydrations_max",
    "a dataflow reads its first contents at once",
    "it waits, suspended",
)
ENGINE_INPUT: Final = SettingThreshold(
    "engine_inline_bytes_max",
    "rows go to the engine in the job's message",
    "they go as a file",
)
ENGINE_ANSWER: Final = SettingThreshold(
    "engine_inline_bytes_max",
    "the engine's rows come in its message",
    "they come as a file",
    decision="answers",
)
TOUCHED_ROWS: Final = SettingThreshold(
    "lookup_rows_max",
    "rows that a step touches are looked up",
    "the shard is scanned in Spark",
)
STEP_PAIRS: Final = SettingThreshold(
    "step_pairs_max",
    "the changes of a step's times meet few rows",
    "they make too many pairs: the step is halved",
)
MET_PAIRS: Final = KernelLimit(
    "step_met_pairs", 20_000,
    "changed rows make about as many pairs as there are rows that they meet",
    "the pairs are counted by key",
)  # fmt: skip
DUE_BYTES: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "what comes due in a step fits into it",
    "the step is halved",
    decision="due",
)
DUE_BUCKETS: Final = KernelLimit(
    "due_buckets", 10_000,
    "what comes due in a step is looked up second by second",
    "all that is to come is read",
)  # fmt: skip
EAGER_ROWS: Final = SettingThreshold(
    "eager_aggregation_rows_min",
    "the rows of a side of a join are joined, then summed",
    "they are summed first, by the key of the join",
)
HIDDEN_ROWS: Final = SettingThreshold(
    "hidden_rows_whole_max",
    "hidden aggregate state goes into a step whole",
    "it is looked up by key",
)
STEP_BUDGET: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "a step goes as far as its inputs are described",
    "it ends where its parts exceed the budget",
)
STEP_ROWS: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "the rows of a step fit",
    "the step is cut at a time",
    decision="rows",
)
FETCH_BUDGET: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "a part is fetched beside others",
    "it waits for them",
    decision="fetches",
)
LISTEN_CREDIT: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "a batch is described within the credit",
    "it waits for a grant",
    decision="descriptions",
)
LISTEN_JOIN: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "a batch that waits is described with the one before it",
    "it is described alone",
    decision="joined",
)
DESCRIBED: Final = SettingThreshold(
    "described_in_flight_max",
    "a description is sent ahead of the grants",
    "it waits, since so many are unanswered",
)
FETCHES: Final = SettingThreshold(
    "fetches_in_flight_max",
    "a part is fetched at once",
    "it waits, since so many are being fetched",
)
FILLING_GAP: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "what an arrangement lacks is read from the shard",
    "the arrangement is given up for a new one",
    decision="gap",
)
ARRANGEMENT_LAG: Final = SettingThreshold(
    "arrangement_lag_bytes_max",
    "a laggard stays a user of the shared arrangement",
    "it is detached from it",
)
STATEMENT_ON_LOOP: Final = KernelLimit(
    "statement_loop_characters",
    8_192,
    "a statement is parsed and rewritten on the event loop",
    "it is in a thread",
)
LOOP_ROWS: Final = KernelLimit(
    "loop_rows", 5_000,
    "a step's rows are worked on on the event loop",
    "they are in a thread",
)  # fmt: skip
CUT_ROWS: Final = KernelLimit(
    "fetch_loop_rows", 20_000,
    "a fetched part is cut on the event loop",
    "it is in a thread",
)  # fmt: skip
LIMIT_RESERVE: Final = KernelLimit(
    "limit_reserve_rows", 256,
    "the rows that a view's LIMIT keeps beyond its own last, and a sixteenth in each group",
    "they are used up: the whole input is read, or the group",
)  # fmt: skip
COLD_STEPS: Final = KernelLimit(
    "policy_cold_steps", 5,
    "the time of a first step that is planned anew says nothing",
    "it is measured",
)  # fmt: skip
QUIET_STEPS: Final = KernelLimit(
    "view_quiet_steps", 2,
    "all strata of a step run together",
    "the first runs alone, since several steps in a row have changed nothing",
)  # fmt: skip

HELD_BYTES: Final = KernelLimit(
    "view_held_bytes", 8 * 1024 * 1024,
    "changes since a view's error are kept, and a step over them ends it",
    "they are many: the view is computed whole to end it",
)  # fmt: skip

# -- reads and answers -----------------------------------------------------------------------------

INLINE_ANSWER: Final = SettingThreshold(
    "inline_bytes_max",
    "an answer goes to the client inline",
    "it goes by the stash",
)
SUBSCRIBED_BATCH: Final = SettingThreshold(
    "result_bytes_max",
    "a batch of a subscribe goes inline",
    "it goes by the stash",
)
SUBSCRIBE_ROOM: Final = SettingThreshold(
    "subscribe_inflight_bytes_max",
    "a subscriber is sent what comes",
    "it waits for the subscriber to take some",
)
QUERY_ANSWER: Final = SettingThreshold(
    "inline_bytes_max",
    "a query's rows go inline",
    "they go by the stash",
    decision="queries",
)
TOP_ROWS: Final = KernelLimit(
    "top_gathered_rows", 4_096,
    "rows of a peek with ORDER BY and LIMIT are gathered",
    "the first of them are kept, and the others let go",
)  # fmt: skip
KEYED_ON_LOOP: Final = KernelLimit(
    "keyed_on_loop", 256,
    "rows of so few keys of a table are looked up on the event loop",
    "they are in a thread",
)  # fmt: skip
UNFED_ROWS: Final = KernelLimit(
    "unfed_rows", 256,
    "rows that were written are looked up by their keys, until there are more",
    "they are arranged",
)  # fmt: skip
FED_ON_LOOP: Final = KernelLimit(
    "fed_on_loop_rows", 1_024,
    "rows that were written are arranged on the event loop",
    "they are in a thread",
)  # fmt: skip
POINT_ROWS: Final = KernelLimit(
    "point_rows", 256,
    "a peek of one key is answered at once",
    "so many rows go the long way",
)  # fmt: skip
POINT_KEYS: Final = KernelLimit(
    "point_keys_bytes", 4096,
    "a peek's keys are looked at for a single one",
    "so many are not",
)  # fmt: skip

# -- the cluster and its clients -------------------------------------------------------------------

FRAME_SLICE: Final = KernelLimit(
    "frame_slice_bytes", (1 << 20) - 1,
    "a frame is written at once",
    "it is written in slices",
)  # fmt: skip
GROUPED_WRITES: Final = KernelLimit(
    "group_writes", 256,
    "all writes that wait are one group",
    "some wait for the next",
)  # fmt: skip
BULK_INSERT: Final = KernelLimit(
    "bulk_insert_rows", 256,
    "the keys of an insert are compared one by one",
    "by their hashes",
)  # fmt: skip
GROUP_ON_LOOP: Final = KernelLimit(
    "group_loop_bytes", 16 * 1024,
    "a group of writes is worked on the event loop",
    "it is in a thread",
)  # fmt: skip

# -- the engine ------------------------------------------------------------------------------------

LOCAL_FILES: Final = KernelLimit(
    "engine_local_bytes", 4 * 1024 * 1024,
    "the engine's child reads parts itself",
    "Spark reads them",
)  # fmt: skip
LEFTOVER_ROWS: Final = KernelLimit(
    "engine_leftover_bytes", 256 * 1024,
    "what jobs have left in Spark's JVM waits for further ones",
    "it is freed",
)  # fmt: skip
LOCAL_RELATION: Final = KernelLimit(
    "engine_relation_bytes", 8 * 1024 * 1024,
    "rows, as often as a plan has them, are objects in it",
    "they are decoded where they are used",
)  # fmt: skip
SMALL_JOB: Final = KernelLimit(
    "engine_small_bytes", 8 * 1024 * 1024,
    "a job runs in one partition",
    "it runs in as many as Spark likes",
)  # fmt: skip
PREPARED_JOB: Final = KernelLimit(
    "engine_prepared_bytes", 64 * 1024 * 1024,
    "a step of more rows than a small one may run from a prepared plan",
    "it is a job, which Spark divides",
)  # fmt: skip
INTERPRETED_ROWS: Final = KernelLimit(
    "prepared_few_rows", 8_192,
    "the operators of a prepared step are interpreted",
    "they are compiled",
)  # fmt: skip
TABLE_BATCH: Final = KernelLimit(
    "engine_batch_rows", 65_536,
    "rows go to the JVM as one batch",
    "they go as several partitions",
)  # fmt: skip
RETRACTING_BYTES: Final = KernelLimit(
    "retracting_bytes", 64 << 20,
    "the rows that retractions touch are told by their keys, and summed up alone",
    "all rows are summed up",
)  # fmt: skip
REPEATED_ROWS: Final = KernelLimit(
    "engine_repeated_rows", 2_000_000,
    "rows are repeated by their weights in the child",
    "Spark repeats them",
)  # fmt: skip
BROADCAST: Final = KernelLimit(
    "engine_broadcast_bytes", 8 * 1024 * 1024,
    "the smaller side of a large step's join is broadcast",
    "Spark chooses the join",
)  # fmt: skip
COLLECTED: Final = SettingThreshold(
    "engine_collected_bytes_max",
    "an answer is collected through the driver",
    "Spark writes it to files",
)
PLAN_NODES: Final = SettingThreshold(
    "engine_plan_nodes_max",
    "strata run as one statement",
    "they run in pieces",
)
SLOT_BYTES: Final = SettingThreshold(
    "prepared_slot_bytes_max",
    "a step's rows fit a prepared plan's slots",
    "the step is planned anew",
)
WIDER_USES: Final = KernelLimit(
    "prepared_wider_uses", 20,
    "a step without a plan of its own uses one that does more",
    "such steps have done so often: a plan is made for them",
)  # fmt: skip
PREPARED_PLANS: Final = SettingThreshold(
    "prepared_plans_max",
    "a prepared plan finds room",
    "the oldest is dropped for it",
)
PREPARED_EACH: Final = SettingThreshold(
    "prepared_plans_per_dataflow_max",
    "one more plan of a dataflow is kept",
    "its oldest is dropped for it",
)
CUT_NODES: Final = KernelLimit(
    "plan_shared_nodes", 50,
    "what operators share is written twice",
    "it is a stratum of its own",
)  # fmt: skip

# -- sources and sinks -----------------------------------------------------------------------------

TRANSACTION_BYTES: Final = SettingThreshold(
    "source_inflight_bytes_max",
    "a transaction's rows are gathered",
    "they are written as parts before it ends",
)
GENERATED_EVENTS: Final = KernelLimit(
    "generated_events_inline", 500,
    "events are made on the event loop",
    "they are made in a thread",
)  # fmt: skip
FILE_PIECE: Final = KernelLimit(
    "file_piece_bytes", 8 << 20,
    "a file is taken as one piece",
    "it is taken in several",
)  # fmt: skip
LISTED_FILES: Final = ThresholdProbe(
    "files that a listing remembers",  # what is forgotten decides what is new: no setting
    "all files that were taken are remembered",
    "the oldest are forgotten",
)
SINK_FILE: Final = KernelLimit(
    "sink_file_bytes", 64 << 20,
    "a sink's batch is one file",
    "it is several",
)  # fmt: skip
SINK_COMMIT: Final = SettingThreshold(
    "sink_bytes_max",
    "a sink commits all changes that are there",
    "it commits some of them",
)
DELETED_ROWS: Final = KernelLimit(
    "delta_held_bytes", 32 << 20,
    "rows that leave a Delta table are held in memory",
    "they are held in files",
)  # fmt: skip
SMALL_FILES: Final = KernelLimit(
    "delta_small_files", 16,
    "small files of a Delta table stay",
    "they are joined",
)  # fmt: skip

KERNEL_LIMITS: Final[Mapping[str, KernelLimit]] = {
    each.name: each for each in THRESHOLDS if isinstance(each, KernelLimit)
}
"""Kernel limits by their names, as the setting `kernel_limits` has them."""

_counts: memoryview[int] | list[int] = [0] * (2 * len(THRESHOLDS))


def counts() -> list[int]:
    """Return a copy of this process's counts, two for each threshold: within, beyond."""
    return list(_counts)


def use_kernel_limits(limits: Mapping[str, int]) -> None:
    """Set the kernel limits of this process: those given by name, all others to their defaults."""
    for name, threshold in KERNEL_LIMITS.items():
        threshold.limit = limits.get(name, threshold.default)


def count_into(folder: str) -> None:
    """Count from now on into a new file of this process in `folder`, what was counted so far
    included. Raises `OSError` when there can be none."""
    global _counts
    name = f"{os.getpid()}-{os.urandom(6).hex()}{COUNTS_SUFFIX}"
    size = COUNT_BYTES * 2 * len(THRESHOLDS)
    file = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(file, size)
        # Mapped: a process that is killed leaves its counts behind, too.
        mapped = memoryview(mmap.mmap(file, size)).cast("Q")
    finally:
        os.close(file)
    for place, count in enumerate(_counts):
        mapped[place] = count
    _counts = mapped


_folder = os.environ.get(COUNTS_VARIABLE)
if _folder and os.path.isdir(_folder):
    count_into(_folder)

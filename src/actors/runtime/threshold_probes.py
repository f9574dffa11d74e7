"""Thresholds: the decisions that depend on a size, a count or an age, and how often each side ran.

Small tests never take a path that only large data take. So each such decision is declared here,
made through its threshold, and counted. `docs/internals/testing.md` lists the counts of the last
full test run, and a full run fails if a side was never taken. Tests draw small settings from their
seed (`actors.testing.drawn_settings`), so that ten rows take every path that ten million rows take.

Counts are kept in memory or, if the environment variable `COUNTS_VARIABLE` names a folder, in a
mapped file of this process there.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

COUNTS_VARIABLE: Final = "THRESHOLD_COUNTS_DIR"
COUNTS_SUFFIX: Final = ".counts"
COUNT_BYTES: Final = 8
"""Size of a count in a file, which is a native unsigned integer."""


class ThresholdProbe:
    """A named decision. `within` and `beyond` describe what happens on its two sides."""

    __slots__ = ("beyond", "name", "place", "within")

    def __init__(self, name: str, within: str, beyond: str) -> None:
        self.name: Final = name
        self.within: Final = within
        self.beyond: Final = beyond
        self.place: Final = 2 * len(THRESHOLDS)
        """Index of the count within; the count beyond follows it."""
        THRESHOLDS.append(self)

    def crossed(self, beyond: bool) -> bool:
        """Count the side that is taken. Return `beyond` unchanged."""
        _counts[self.place + beyond] += 1
        return beyond


class SettingThreshold(ThresholdProbe):
    """A decision that depends on the field `setting` of `Settings`."""

    __slots__ = ("setting",)

    def __init__(self, setting: str, within: str, beyond: str, *, decision: str = "") -> None:
        """Declare the decision. `decision` distinguishes several decisions by the same setting."""
        super().__init__(f"{setting}: {decision}" if decision else setting, within, beyond)
        self.setting: Final = setting


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
    "an append continues",
    "an append compacts the shard first",
)
PART_COUNT: Final = SettingThreshold(
    "part_bytes_target",
    "updates outside the document are one part",
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
    "a part list in a blob describes them",
)
PART_STATISTICS: Final = SettingThreshold(
    "part_statistics_bytes_max",
    "all columns of a part have statistics",
    "the longest statistics are left out",
)
DECODED_ROOM: Final = SettingThreshold(
    "decoded_parts_bytes_max",
    "a decoded part is cached",
    "a decoded part is too large for the cache",
)
DECODED_EVICTION: Final = SettingThreshold(
    "decoded_parts_bytes_max",
    "all decoded parts stay in the cache",
    "the oldest are evicted",
    decision="eviction",
)
BATCH_COUNT: Final = SettingThreshold(
    "batches_per_shard_max",
    "a shard's batches stay as they are",
    "its newest batches are merged",
)
FILTER_AUDIT: Final = SettingThreshold(
    "filter_audit_one_in",
    "a part that the filter skips is read to verify the filter",
    "it is not read",
)
BUCKET_PIECE: Final = ThresholdProbe(
    "bucket object written",  # not a setting, because S3 requires pieces of about this size
    "a bucket object is written by one request",
    "it is written in pieces",
)
BUCKET_READ: Final = ThresholdProbe(
    "bucket object read",
    "a bucket object is read by one request",
    "it is read in pieces",
)

# -- dataflows -------------------------------------------------------------------------------------

HYDRATION_CHUNK: Final = SettingThreshold(
    "hydration_chunk_bytes",
    "an additive view is hydrated in one go",
    "it is hydrated in chunks",
)
HYDRATION_QUEUE: Final = SettingThreshold(
    "hydrations_max",
    "a dataflow hydrates immediately",
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
    "the rows that a step touches are looked up",
    "the shard is scanned in Spark",
)
STEP_PAIRS: Final = SettingThreshold(
    "step_pairs_max",
    "the changes of a step match few rows",
    "they form too many pairs, so the step is halved",
)
DUE_BYTES: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "the rows that come due in a step fit",
    "the step is halved",
    decision="due",
)
EAGER_ROWS: Final = SettingThreshold(
    "eager_aggregation_rows_min",
    "the rows of a side of a join are joined, then summed",
    "they are summed before the join, by its key",
)
HIDDEN_ROWS: Final = SettingThreshold(
    "hidden_rows_whole_max",
    "hidden aggregate state is read in full by a step",
    "it is looked up by key",
)
STEP_BUDGET: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "a step extends to the described end of its inputs",
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
    "a part is fetched concurrently with others",
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
    "a waiting batch is described together with the one before it",
    "it is described separately",
    decision="joined",
)
DESCRIBED: Final = SettingThreshold(
    "described_in_flight_max",
    "a description is sent ahead of the grants",
    "it waits, because too many are unanswered",
)
FETCHES: Final = SettingThreshold(
    "fetches_in_flight_max",
    "a part is fetched immediately",
    "it waits, because too many are being fetched",
)
FILLING_GAP: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "the missing part of an arrangement is read from the shard",
    "the arrangement is replaced by a new one",
    decision="gap",
)
ARRANGEMENT_LAG: Final = SettingThreshold(
    "arrangement_lag_bytes_max",
    "a lagging user stays on the shared arrangement",
    "it is detached from it",
)

# -- reads and answers -----------------------------------------------------------------------------

INLINE_ANSWER: Final = SettingThreshold(
    "inline_bytes_max",
    "an answer goes to the client inline",
    "it goes through the stash",
)
SUBSCRIBED_BATCH: Final = SettingThreshold(
    "result_bytes_max",
    "a batch of a subscribe goes inline",
    "it goes through the stash",
)
SUBSCRIBE_ROOM: Final = SettingThreshold(
    "subscribe_inflight_bytes_max",
    "changes are sent to a subscriber",
    "they wait until the subscriber has accepted some",
)
QUERY_ANSWER: Final = SettingThreshold(
    "inline_bytes_max",
    "a query's rows go inline",
    "they go through the stash",
    decision="queries",
)

# -- the engine ------------------------------------------------------------------------------------

COLLECTED: Final = SettingThreshold(
    "engine_collected_bytes_max",
    "an answer is collected through the driver",
    "Spark writes it to files",
)
PLAN_NODES: Final = SettingThreshold(
    "engine_plan_nodes_max",
    "strata run as one statement",
    "they run as several statements",
)
SLOT_BYTES: Final = SettingThreshold(
    "prepared_slot_bytes_max",
    "a step's rows fit a prepared plan's slots",
    "the step is planned from scratch",
)
PREPARED_PLANS: Final = SettingThreshold(
    "prepared_plans_max",
    "there is room for a prepared plan",
    "the oldest is dropped for it",
)
PREPARED_EACH: Final = SettingThreshold(
    "prepared_plans_per_dataflow_max",
    "another plan of a dataflow is kept",
    "its oldest is dropped for it",
)

# -- sources and sinks -----------------------------------------------------------------------------

TRANSACTION_BYTES: Final = SettingThreshold(
    "source_inflight_bytes_max",
    "a transaction's rows are kept in memory",
    "they are written as parts before it ends",
)
LISTED_FILES: Final = ThresholdProbe(
    "files that a listing remembers",  # not a setting, because it decides which files are new
    "all files read so far are remembered",
    "the oldest are forgotten",
)
SINK_COMMIT: Final = SettingThreshold(
    "sink_bytes_max",
    "a sink commits all available changes",
    "it commits some of them",
)

_counts: memoryview[int] | list[int] = [0] * (2 * len(THRESHOLDS))


def counts() -> list[int]:
    """Return a copy of this process's counts, two for each threshold: within and beyond."""
    return list(_counts)


def count_into(folder: str) -> None:
    """Count into a new file in `folder` from now on, and copy the counts so far into it.

    Raises `OSError` if the file cannot be created.
    """
    global _counts
    name = f"{os.getpid()}-{os.urandom(6).hex()}{COUNTS_SUFFIX}"
    size = COUNT_BYTES * 2 * len(THRESHOLDS)
    file = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(file, size)
        # Mapped, so that the counts of a killed process are kept as well.
        mapped = memoryview(mmap.mmap(file, size)).cast("Q")
    finally:
        os.close(file)
    for place, count in enumerate(_counts):
        mapped[place] = count
    _counts = mapped


_folder = os.environ.get(COUNTS_VARIABLE)
if _folder and os.path.isdir(_folder):
    count_into(_folder)

"""Thresholds: every place where a setting decides which path runs by a size, a count or an age, and
a count of how often each side was taken.

A path that only large data take is never taken by small tests. So each such decision names its
threshold here, is made through it, and is counted: `docs/internals/testing.md` lists the counts of
the last full test run, and a full run fails when a side was never taken. Tests draw small settings
from their seed (`actors.testing.drawn_settings`), and ten rows take every path that ten million
take.

Counts are in memory, or, when the environment variable `COUNTS_VARIABLE` names a folder, in a
mapped file of this process there.
"""

from __future__ import annotations

import mmap
import os
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

# -- dataflows -------------------------------------------------------------------------------------

HYDRATION_CHUNK: Final = SettingThreshold(
    "hydration_chunk_bytes",
    "the first contents of an additive view are computed at once",
    "they are computed in chunks",
)
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
DUE_BYTES: Final = SettingThreshold(
    "inflight_bytes_per_dataflow_max",
    "what comes due in a step fits into it",
    "the step is halved",
    decision="due",
)
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

# -- the engine ------------------------------------------------------------------------------------

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

# -- sources and sinks -----------------------------------------------------------------------------

TRANSACTION_BYTES: Final = SettingThreshold(
    "source_inflight_bytes_max",
    "a transaction's rows are gathered",
    "they are written as parts before it ends",
)
LISTED_FILES: Final = ThresholdProbe(
    "files that a listing remembers",  # what is forgotten decides what is new: no setting
    "all files that were taken are remembered",
    "the oldest are forgotten",
)
SINK_COMMIT: Final = SettingThreshold(
    "sink_bytes_max",
    "a sink commits all changes that are there",
    "it commits some of them",
)

_counts: memoryview[int] | list[int] = [0] * (2 * len(THRESHOLDS))


def counts() -> list[int]:
    """Return a copy of this process's counts, two for each threshold: within, beyond."""
    return list(_counts)


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

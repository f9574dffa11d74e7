"""States of a dataflow, and the table of events that each of them accepts.

`machine` has the handlers, by name, and explains the states.
"""

from __future__ import annotations

import enum
from typing import Final

from actors.dataflow.events import (
    DropRequested,
    Event,
    FailedDefinitely,
    ReplicaFollowed,
    RetryDue,
    SourcesReady,
    StageFailed,
    StandbyExpired,
    StateRestored,
    StepCommitted,
    StepComputed,
    StepDue,
    StepInstalled,
    SuspensionEnded,
    UpperMismatched,
)
from actors.protocol.internal import FetchFailed, ListenFailed, PartFetched, PartsDescribed


class DataflowPhase(enum.Enum):
    """State of a dataflow."""

    SUSPENDED = "suspended"
    HYDRATING = "hydrating"
    GATHERING = "gathering"
    STANDING_BY = "standing by"
    RUNNING = "running"
    COMMITTING = "committing"
    FOLLOWING = "following"
    INSTALLING = "installing"
    ERRORED = "errored"
    FROZEN = "frozen"
    DROPPED = "dropped"


REST: Final = (DataflowPhase.GATHERING, DataflowPhase.ERRORED)
CARRYING: Final = (
    DataflowPhase.STANDING_BY,
    DataflowPhase.RUNNING,
    DataflowPhase.COMMITTING,
    DataflowPhase.FOLLOWING,
    DataflowPhase.INSTALLING,
)
LIVE: Final = (DataflowPhase.HYDRATING, *REST, *CARRYING)

TRANSITIONS: Final[dict[type[Event], tuple[tuple[DataflowPhase, ...], str]]] = {
    # event: (states that accept it, handler)
    SuspensionEnded: ((DataflowPhase.SUSPENDED,), "_scheduled"),
    StateRestored: ((DataflowPhase.HYDRATING,), "_restored"),
    SourcesReady: ((DataflowPhase.HYDRATING,), "_sources_ready"),
    PartsDescribed: ((*REST, *CARRYING), "_described"),
    PartFetched: ((*REST, *CARRYING), "_fetched"),
    FetchFailed: (LIVE, "_source_failed"),
    ListenFailed: (LIVE, "_source_failed"),
    StepComputed: ((DataflowPhase.RUNNING,), "_computed"),
    FailedDefinitely: ((DataflowPhase.RUNNING,), "_failed_definitely"),
    StepCommitted: ((DataflowPhase.COMMITTING,), "_committed"),
    UpperMismatched: ((DataflowPhase.STANDING_BY, DataflowPhase.COMMITTING), "_mismatched"),
    StandbyExpired: ((DataflowPhase.STANDING_BY,), "_begin"),
    ReplicaFollowed: ((DataflowPhase.FOLLOWING,), "_followed"),
    StepInstalled: ((DataflowPhase.INSTALLING,), "_installed"),
    StageFailed: (LIVE, "_failed"),
    RetryDue: ((*LIVE, DataflowPhase.FROZEN), "_retry_due"),
    StepDue: (REST, "_step_due"),
    DropRequested: (
        tuple(state for state in DataflowPhase if state is not DataflowPhase.DROPPED),
        "_dropped",
    ),
}

"""States of a dataflow, and the table of events that each of them accepts.

`machine` has the handlers, by name, and explains the states.
"""

from __future__ import annotations

import enum
from typing import Final

from actors.dataflow.events import (
    Committed,
    Computed,
    Drop,
    Event,
    Failed,
    FailedDefinitely,
    Followed,
    Installed,
    Mismatched,
    Restored,
    RetryDue,
    Schedule,
    SourcesReady,
    StepDue,
    Unclaimed,
)
from actors.protocol.internal import Described, Fetched, FetchFailed, ListenFailed


class State(enum.Enum):
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


REST: Final = (State.GATHERING, State.ERRORED)
CARRYING: Final = (
    State.STANDING_BY,
    State.RUNNING,
    State.COMMITTING,
    State.FOLLOWING,
    State.INSTALLING,
)
LIVE: Final = (State.HYDRATING, *REST, *CARRYING)

TRANSITIONS: Final[dict[type[Event], tuple[tuple[State, ...], str]]] = {
    # event: (states that accept it, handler)
    Schedule: ((State.SUSPENDED,), "_scheduled"),
    Restored: ((State.HYDRATING,), "_restored"),
    SourcesReady: ((State.HYDRATING,), "_sources_ready"),
    Described: ((*REST, *CARRYING), "_described"),
    Fetched: ((*REST, *CARRYING), "_fetched"),
    FetchFailed: (LIVE, "_source_failed"),
    ListenFailed: (LIVE, "_source_failed"),
    Computed: ((State.RUNNING,), "_computed"),
    FailedDefinitely: ((State.RUNNING,), "_failed_definitely"),
    Committed: ((State.COMMITTING,), "_committed"),
    Mismatched: ((State.STANDING_BY, State.COMMITTING), "_mismatched"),
    Unclaimed: ((State.STANDING_BY,), "_begin"),
    Followed: ((State.FOLLOWING,), "_followed"),
    Installed: ((State.INSTALLING,), "_installed"),
    Failed: (LIVE, "_failed"),
    RetryDue: ((*LIVE, State.FROZEN), "_retry_due"),
    StepDue: (REST, "_step_due"),
    Drop: (tuple(state for state in State if state is not State.DROPPED), "_dropped"),
}

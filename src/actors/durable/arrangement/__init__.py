"""Collections indexed by key, as immutable sorted runs of Arrow. This file re-exports the public
names."""

from actors.durable.arrangement.arrangement import Arrangement as Arrangement
from actors.durable.arrangement.arrangement import ArrangementLimits as ArrangementLimits
from actors.durable.arrangement.arrangement import ArrangementStatistics as ArrangementStatistics
from actors.durable.arrangement.arrangement import partition as partition
from actors.durable.arrangement.shared import ArrangementFill as ArrangementFill
from actors.durable.arrangement.shared import ArrangementHandle as ArrangementHandle
from actors.durable.arrangement.shared import SharedArrangements as SharedArrangements
from actors.durable.arrangement.shared import SharedStatistics as SharedStatistics

"""Collections indexed by key, as immutable sorted runs of Arrow. Re-exports the public names."""

from actors.arrangement.arrangement import Arrangement as Arrangement
from actors.arrangement.arrangement import ArrangementLimits as ArrangementLimits
from actors.arrangement.arrangement import ArrangementStatistics as ArrangementStatistics
from actors.arrangement.arrangement import partition as partition
from actors.arrangement.shared import ArrangementFill as ArrangementFill
from actors.arrangement.shared import ArrangementHandle as ArrangementHandle
from actors.arrangement.shared import SharedArrangements as SharedArrangements
from actors.arrangement.shared import SharedStatistics as SharedStatistics

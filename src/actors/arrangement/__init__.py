"""Collections indexed by key, as immutable sorted runs of Arrow. Re-exports the public names."""

from actors.arrangement.arrangement import Arrangement as Arrangement
from actors.arrangement.arrangement import ArrangementStatistics as ArrangementStatistics
from actors.arrangement.arrangement import Limits as Limits
from actors.arrangement.arrangement import partition as partition
from actors.arrangement.shared import Filling as Filling
from actors.arrangement.shared import Handle as Handle
from actors.arrangement.shared import SharedArrangements as SharedArrangements
from actors.arrangement.shared import SharedStatistics as SharedStatistics

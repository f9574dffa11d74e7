"""Actors: bounded mailboxes, envelopes, contexts and their supervision.

Imports only errors and telemetry of the project. Re-exports the public names.
"""

from actors.kernel.actor import Actor as Actor
from actors.kernel.actor import Address as Address
from actors.kernel.actor import Context as Context
from actors.kernel.actor import Effect as Effect
from actors.kernel.cell import ActorStatistics as ActorStatistics
from actors.kernel.clock import Clock as Clock
from actors.kernel.clock import SystemClock as SystemClock
from actors.kernel.lane import Lane as Lane
from actors.kernel.mailbox import Mailbox as Mailbox
from actors.kernel.mailbox import MailboxStatistics as MailboxStatistics
from actors.kernel.mailbox import Reply as Reply
from actors.kernel.mailbox import Traced as Traced
from actors.kernel.policy import ESCALATE as ESCALATE
from actors.kernel.policy import STOP as STOP
from actors.kernel.policy import ActorCrashed as ActorCrashed
from actors.kernel.policy import Policy as Policy
from actors.kernel.policy import restart as restart
from actors.kernel.supervisor import System as System

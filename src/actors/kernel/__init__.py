"""Actors: bounded mailboxes, envelopes, contexts and their supervision.

Knows nothing of the rest of the project. What the rest uses is re-exported here, once.
"""

from actors.kernel.actor import Actor as Actor
from actors.kernel.actor import Address as Address
from actors.kernel.actor import Context as Context
from actors.kernel.actor import Effect as Effect
from actors.kernel.clock import Clock as Clock
from actors.kernel.clock import SystemClock as SystemClock
from actors.kernel.mailbox import Envelope as Envelope
from actors.kernel.mailbox import Mailbox as Mailbox
from actors.kernel.mailbox import MailboxStatistics as MailboxStatistics
from actors.kernel.mailbox import Reply as Reply
from actors.kernel.supervisor import ESCALATE as ESCALATE
from actors.kernel.supervisor import STOP as STOP
from actors.kernel.supervisor import ActorCrashed as ActorCrashed
from actors.kernel.supervisor import Policy as Policy
from actors.kernel.supervisor import System as System
from actors.kernel.supervisor import restart as restart

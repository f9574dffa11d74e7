"""Actors: bounded mailboxes, envelopes, contexts and their supervision.

Imports only errors and telemetry of the project. Re-exports the public names.
"""

from actors.kernel.actor import ESCALATE as ESCALATE
from actors.kernel.actor import STOP as STOP
from actors.kernel.actor import Actor as Actor
from actors.kernel.actor import ActorAddress as ActorAddress
from actors.kernel.actor import ActorContext as ActorContext
from actors.kernel.actor import ActorCrashed as ActorCrashed
from actors.kernel.actor import CrashPolicy as CrashPolicy
from actors.kernel.actor import RunningEffect as RunningEffect
from actors.kernel.actor import restart as restart
from actors.kernel.clock import ActorClock as ActorClock
from actors.kernel.clock import SystemClock as SystemClock
from actors.kernel.lane import FlowWindow as FlowWindow
from actors.kernel.mailbox import BoundedMailbox as BoundedMailbox
from actors.kernel.mailbox import MailboxStatistics as MailboxStatistics
from actors.kernel.mailbox import ReplySlot as ReplySlot
from actors.kernel.retry import RetryLoop as RetryLoop
from actors.kernel.retry import with_jitter as with_jitter
from actors.kernel.supervisor import ActorSystem as ActorSystem
from actors.telemetry import ActorStatistics as ActorStatistics
from actors.telemetry import TracedMessage as TracedMessage

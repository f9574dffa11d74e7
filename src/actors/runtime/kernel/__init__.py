"""Actors with bounded mailboxes, their contexts and their supervision.

This package imports nothing of the project but errors, telemetry and metrics. It exports the public
names of its modules.
"""

from actors.runtime.kernel.actor import ESCALATE as ESCALATE
from actors.runtime.kernel.actor import STOP as STOP
from actors.runtime.kernel.actor import Actor as Actor
from actors.runtime.kernel.actor import ActorAddress as ActorAddress
from actors.runtime.kernel.actor import ActorContext as ActorContext
from actors.runtime.kernel.actor import ActorCrashed as ActorCrashed
from actors.runtime.kernel.actor import CrashPolicy as CrashPolicy
from actors.runtime.kernel.actor import RunningEffect as RunningEffect
from actors.runtime.kernel.actor import restart as restart
from actors.runtime.kernel.clock import ActorClock as ActorClock
from actors.runtime.kernel.clock import SystemClock as SystemClock
from actors.runtime.kernel.flow_window import FlowWindow as FlowWindow
from actors.runtime.kernel.mailbox import BoundedMailbox as BoundedMailbox
from actors.runtime.kernel.mailbox import MailboxStatistics as MailboxStatistics
from actors.runtime.kernel.mailbox import ReplySlot as ReplySlot
from actors.runtime.kernel.outbox import CoalescingOutbox as CoalescingOutbox
from actors.runtime.kernel.retry import RetryLoop as RetryLoop
from actors.runtime.kernel.retry import with_jitter as with_jitter
from actors.runtime.kernel.supervisor import ActorSystem as ActorSystem
from actors.runtime.telemetry import ActorStatistics as ActorStatistics
from actors.runtime.telemetry import TracedMessage as TracedMessage

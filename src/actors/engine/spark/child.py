"""The engine's own process: ``python -m actors.engine.spark.child FD``.

The parent hands over one end of a socket pair and sends `EngineStart`; the child starts Spark and
answers `EngineReady`. From then on the main thread only reads. Jobs go to a bounded set of worker
threads, each with its own sessions and its own fair pool; a worker writes its answer as one frame.

The process ends at end of file on the socket (the parent is gone), when its JVM ends, when its
Spark context stops in a living JVM (a cluster's master removed the application), and when its Spark
Connect server does not answer. The parent then starts a successor, which is given the same jobs:
the process holds no state that a successor could not be given. A JVM of our own ends with the
process, because it reads our end of a pipe.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import secrets
import select
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from actors.engine.spark.disk_watch import WATCH_SECONDS, disk_refusal, running_bytes
from actors.engine.spark.engine_start import CHILD_FOLDER, ChildMessage, EngineStart
from actors.engine.spark.failures import SparkGone
from actors.engine.spark.job_spans import is_traced, traced
from actors.engine.spark.jobs import JobTicket, SparkEngine, TaskCounts
from actors.engine.spark.prepared_plan import PreparedPlan
from actors.engine.spark.remote_address import is_remote, redact_secrets
from actors.engine.spark.session import CONNECT_TOKEN, NO_DEFAULTS, open_session, spark_conf
from actors.engine.spark.steps import ThreadSlot
from actors.model.plan.jobs import (
    Answer,
    CancelChildJob,
    ForgetPlan,
    Job,
    JobFailed,
    JobProgress,
    PreparePlan,
    QueryFiles,
    RehearseSteps,
    RunStep,
    SelectContents,
)
from actors.runtime.errors import PenstockError
from actors.runtime.frames import HEADER, FrameCodec
from actors.runtime.settings import Settings
from actors.runtime.telemetry import TracedMessage, split_context

CANCEL_AGAIN_SECONDS: Final = 0.05
PROGRESS_SECONDS: Final = 1.0
WAITING_LOOKS: Final = 3
"""Looks, `PROGRESS_SECONDS` apart, after which a job that waits for a core is given one."""
WATCHER_SECONDS: Final = 2.0
LEFTOVER_BYTES_MAX: Final = 256 * 1024
LEFTOVER_JOBS_MAX: Final = 64
"""Jobs after which what they have left is collected, however small they were."""
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
EXIT_PARENT_GONE: Final = 0
EXIT_SPARK_GONE: Final = 3
EXIT_NOT_STARTED: Final = 4
EXIT_FAULT: Final = 5


class ChildSocket:
    """The socket to the parent: receives whole frames, and sends them from any thread."""

    def __init__(self, end: socket.socket, frame_bytes_max: int) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._codec: FrameCodec[ChildMessage] = FrameCodec(ChildMessage, frame_bytes_max)
        self.frame_bytes = 0
        """Size of the last message received."""

    def receive(self) -> ChildMessage | TracedMessage[ChildMessage] | None:
        """Return the next message, with its trace context; None when the parent is gone."""
        while True:
            header = self._exactly(HEADER.size)
            if header is None:
                return None
            self.frame_bytes = length = self._codec.check_length(header)
            if length:
                body = self._exactly(length)
                return None if body is None else self._codec.decode(body)

    def send(self, answer: Answer) -> int:
        """Send an answer; in place of one that is too large, send its error. Return the number of
        bytes."""
        try:
            data = self._codec.encode(answer)
        except PenstockError as error:
            data = self._codec.encode(JobFailed(answer.job_id, "EngineError", str(error)))
        with self._lock:
            self._end.sendall(data)
        return len(data)

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._end.recv_into(view[got:])
            if count == 0:
                return None
            got += count
        return bytes(data)


class JobDispatcher:
    """Hands jobs to worker threads: of the idle ones, to the one that became idle last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[JobTicket] = deque()
        self._resting: list[queue.SimpleQueue[JobTicket]] = []

    def put(self, ticket: JobTicket) -> None:
        """Hand a job to an idle thread, or queue it."""
        with self._lock:
            if self._resting:
                # The last one's sessions are warm: jobs that come one by one all meet the same.
                self._resting.pop().put(ticket)
            else:
                self._waiting.append(ticket)

    def take(self, box: queue.SimpleQueue[JobTicket]) -> JobTicket:
        """Return the next job for the thread that owns `box`; wait for one."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._resting.append(box)
        return box.get()


class SpareTasks:
    """Tells when a job waits for long tasks of others, and needs a core of its own: pure.

    A task is not interrupted for another one. So the tasks of one view that fills for an hour, as
    many as there are cores, would keep all other views from their first contents.
    """

    def __init__(self, tasks_max: int) -> None:
        self._left = tasks_max
        self._waited: dict[str, int] = {}
        """Looks in a row at which no task of a job was running, though it has some to do."""

    def is_short(self, counts: Mapping[str, TaskCounts]) -> bool:
        """Take the tasks of all jobs, at one more look; return whether to run one task more."""
        idle = [
            group for group, each in counts.items() if not each.running and each.done < each.total
        ]
        if len(idle) == len(counts):
            idle = []  # nobody holds the cores
        self._waited = {group: self._waited.get(group, 0) + 1 for group in idle}
        if self._left == 0 or max(self._waited.values(), default=0) < WAITING_LOOKS:
            return False
        self._left -= 1
        self._waited.clear()
        return True


class EngineChild:
    """Runs the jobs of an `SparkEngine` on worker threads."""

    def __init__(self, wire: ChildSocket, engine: SparkEngine) -> None:
        self._wire = wire
        self._engine = engine
        self._plans: dict[str, PreparedPlan] = {}
        self._tickets: dict[str, JobTicket] = {}
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        """Held while a job's progress is sent: the job is not over meanwhile."""
        self._jobs = JobDispatcher()
        self._wake = threading.Event()
        self._serial = 0
        # Of the jobs that have ended since the last collection, with their answers.
        self._left_jobs = self._left_bytes = 0
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._watcher.start()
        threading.Thread(target=self._cancel, name="cancel", daemon=True).start()
        threading.Thread(target=self._tell, name="progress", daemon=True).start()
        if self._engine.settings.engine_disk_bytes_max:
            threading.Thread(target=self._watch_disk, name="disk", daemon=True).start()
        for number in range(self._engine.settings.engine_jobs_in_flight_max):
            pool = f"worker-{number}"
            threading.Thread(target=self._work, args=(pool,), name=pool, daemon=True).start()

    def serve(self) -> None:
        """Read messages until the parent is gone."""
        while (received := self._wire.receive()) is not None:
            message, traceparent = split_context(received)
            match message:
                case ForgetPlan():
                    self._plans.pop(message.dataflow, None)
                case CancelChildJob():
                    self._mark_canceled(message.job_id)
                case EngineStart():
                    raise PenstockError("Start came twice")
                case _:
                    self._accept(message, traced=traceparent is not None)

    def _accept(self, job: Job, *, traced: bool = False) -> None:
        prepared = None
        if isinstance(job, PreparePlan):
            # Filed by the reading thread: a step that follows its `PreparePlan` always finds the
            # plan.
            prepared = self._plans[job.dataflow] = PreparedPlan(job.plan)
            if job.known:
                return
        elif isinstance(job, RunStep | RehearseSteps):
            prepared = self._plans.get(job.dataflow)
        self._serial += 1
        ticket = JobTicket(
            job,
            f"{job.job_id}#{self._serial}",
            prepared,
            traced=traced,
            frame_bytes=self._wire.frame_bytes,
        )
        with self._lock:
            self._tickets[job.job_id] = ticket
        self._jobs.put(ticket)

    def _mark_canceled(self, job_id: str) -> None:
        with self._lock:
            ticket = self._tickets.get(job_id)
            if ticket is not None:
                ticket.canceled.set()
                self._wake.set()

    def _work(self, pool: str) -> None:
        try:
            slot = self._engine.slot()
            box: queue.SimpleQueue[JobTicket] = queue.SimpleQueue()
            while True:
                ticket = self._jobs.take(box)
                answer = self._answer(slot, ticket, pool)
                with self._telling, self._lock:
                    del self._tickets[ticket.job.job_id]
                carried = ticket.bytes + self._wire.send(answer)
                del ticket, answer  # a thread that waits keeps no rows
                self._collect_after(carried)
                _bound_log()
        except OSError:
            exit_process(EXIT_PARENT_GONE, "the parent is gone", self._engine)
        except BaseException as error:  # noqa: BLE001 - a worker's fault ends the process
            exit_process(
                EXIT_FAULT, f"{pool} failed: {type(error).__name__}: {error}", self._engine
            )

    def _collect_after(self, carried: int) -> None:
        """Free what ended jobs have left in Spark's JVM: after many of them, or after large ones.

        Each Java object of which Python has called a method is in a cycle with it. Python's
        collector alone frees it, and by its own count of objects that is after hundreds of jobs:
        until then the JVM keeps their plans, with all rows that came with them.
        """
        with self._lock:
            self._left_jobs += 1
            self._left_bytes += carried
            large = self._left_bytes > LEFTOVER_BYTES_MAX
            due = large or self._left_jobs >= LEFTOVER_JOBS_MAX
            if due:
                self._left_jobs = self._left_bytes = 0
        if due:
            gc.collect()

    def _answer(self, slot: ThreadSlot, ticket: JobTicket, pool: str) -> Answer:
        """Return the job's answer. Ends this process if Spark ended during the job."""
        started = time.time_ns()
        try:
            answer = self._engine.run(slot, ticket, pool)
            if is_traced(ticket):
                answer = traced(self._engine, ticket.group, (started, time.time_ns()), answer)
            return answer
        except SparkGone as error:
            if self._engine.lost():
                # If the JVM has ended, the watcher knows its exit status and leaves with that.
                self._watcher.join(WATCHER_SECONDS)
                exit_process(EXIT_SPARK_GONE, f"Spark is gone: {error}", self._engine)
            # Spark lives: only this call failed.
            return JobFailed(ticket.job.job_id, "EngineLost", str(error))

    def _tell(self) -> None:
        """Send the progress of jobs that take long, whenever it has changed."""
        sent: dict[str, tuple[int, int, int | None]] = {}
        cores = SpareTasks(self._engine.settings.engine_spare_tasks_max)
        try:
            while True:
                threading.Event().wait(PROGRESS_SECONDS)
                with self._lock:
                    groups = {ticket.group: job_id for job_id, ticket in self._tickets.items()}
                # Only groups that the last round saw, too: their jobs have taken a while.
                counts: dict[str, TaskCounts] = {}
                for group, job_id in groups.items():
                    counted = self._engine.progress(group) if group in sent else None
                    if counted is not None:
                        counts[group] = counted
                    found = None if counted is None else counted[:3]
                    if found is not None and found != sent[group]:
                        # Under the lock that `_work` takes to end a job: no progress follows the
                        # job's answer.
                        with self._telling:
                            ticket = self._tickets.get(job_id)
                            if ticket is not None and ticket.group == group:
                                self._wire.send(JobProgress(job_id, *found))
                    sent[group] = found or sent.get(group, (0, 0, None))
                sent = {group: far for group, far in sent.items() if group in groups}
                if cores.is_short(counts):
                    self._engine.add_task()
        except OSError:
            exit_process(EXIT_PARENT_GONE, "the parent is gone", self._engine)
        except Exception as error:  # noqa: BLE001 - no job depends on it
            print(f"progress is told no more: {error}", file=sys.stderr, flush=True)

    def _watch_disk(self) -> None:
        """End the running queries when they take too much disk."""
        limit = self._engine.settings.engine_disk_bytes_max
        while True:
            threading.Event().wait(WATCH_SECONDS)
            refusal = disk_refusal(running_bytes(self._engine.scratch), limit)
            if not refusal:
                continue
            with self._lock:
                for ticket in self._tickets.values():
                    if isinstance(ticket.job, SelectContents | QueryFiles):
                        ticket.refuse(refusal)
                self._wake.set()
            self._engine.interrupt_clients()

    def _cancel(self) -> None:
        while True:
            self._wake.wait()
            with self._lock:
                groups = [t.group for t in self._tickets.values() if t.canceled.is_set()]
                if not groups:
                    self._wake.clear()
            for group in groups:
                try:
                    self._engine.interrupt(group)
                except Exception as error:  # noqa: BLE001 - tried again until the job is over
                    print(f"cancel {group}: {error}", file=sys.stderr, flush=True)
            # Again, until the worker has returned: Spark forgets a cancel that comes before the
            # job.
            threading.Event().wait(CANCEL_AGAIN_SECONDS)

    def _watch(self) -> None:
        why = self._engine.wait_gone()
        exit_process(EXIT_SPARK_GONE, why, self._engine)


START_POLL_MS: Final = 500


def exit_process(code: int, why: str, engine: SparkEngine | None) -> None:
    """End this process now, and with it what it has started."""
    print(why, file=sys.stderr, flush=True)
    try:
        if engine is not None:
            engine.end()
    finally:
        # At once: other threads may be inside calls that never return.
        os._exit(code)


def leave_with_parent(end: socket.socket, started: threading.Event) -> None:
    """End this process if the parent is gone before Spark has started."""
    hung_up = select.poll()
    hung_up.register(end, select.POLLRDHUP)
    # Nothing reads the socket yet, and the next service empties the folder in which Spark's JVM
    # leaves its port: this process would wait for that for ever.
    while not started.is_set():
        if hung_up.poll(START_POLL_MS):
            exit_process(EXIT_PARENT_GONE, "the parent is gone while Spark starts", None)


def _bound_log() -> None:
    """Empty the log when it is full."""
    try:
        # A job that fails for ever must not fill the disk.
        if os.fstat(2).st_size > LOG_BYTES_MAX:
            os.ftruncate(2, 0)
    except OSError:
        return  # not a file


def open_engine(
    settings: Settings,
    scratch: Path,
    class_archive: str = "",
    no_java: str = "",
    defaults: Mapping[str, str] = NO_DEFAULTS,
) -> SparkEngine:
    """Start Spark with the user's `defaults`, or connect to it. Raises `EngineUnavailable` or
    Spark's own error."""
    if is_remote(settings.spark_master):
        # Imported here: Spark Connect's packages need not be installed for any other master.
        from actors.engine.spark.remote import open_remote

        return open_remote(settings, scratch, class_archive, no_java)
    conf = spark_conf(settings, scratch, class_archive, defaults)
    token = ""
    if settings.connect_listen:
        # The JVM inherits it: other users of this machine must not pass by the gateway.
        token = os.environ[CONNECT_TOKEN] = secrets.token_hex(32)
    chosen = frozenset(settings.spark_conf) | frozenset(defaults)
    return SparkEngine(open_session(conf, scratch), settings, scratch, token, chosen)


def main(arguments: list[str]) -> None:
    """Run the child until its parent or its Spark is gone."""
    end = socket.socket(fileno=int(arguments[0]))
    # The JVM must not hold the socket open after this process has ended.
    end.set_inheritable(False)
    first = ChildSocket(end, 1 << 20).receive()
    if not isinstance(first, EngineStart):
        exit_process(EXIT_PARENT_GONE, "no Start came", None)
        return
    # What Spark writes for us holds rows: it is nobody else's, whatever the service's own umask.
    os.umask(0o077)
    settings, scratch = first.settings, Path(first.scratch)
    logging.getLogger("SQLQueryContextLogger").disabled = True
    # PySpark makes a folder for its JVM's port, and leaves it behind if this process is killed.
    temporary = scratch / CHILD_FOLDER / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(temporary)
    started = threading.Event()
    threading.Thread(target=leave_with_parent, args=(end, started), daemon=True).start()
    try:
        engine = open_engine(settings, scratch, first.class_archive, first.no_java, first.defaults)
    except BaseException as error:  # noqa: BLE001 - the log names it
        why = redact_secrets(str(error), settings.spark_master)
        exit_process(EXIT_NOT_STARTED, f"Spark did not start: {type(error).__name__}: {why}", None)
        return
    started.set()
    wire = ChildSocket(end, settings.engine_frame_bytes_max)
    child = EngineChild(wire, engine)
    # What a start has made stays: collections after jobs pass over it, and take a few milliseconds.
    gc.collect()
    gc.freeze()
    child.start()
    wire.send(engine.ready())
    try:
        child.serve()
    except OSError:
        pass
    except PenstockError as error:
        exit_process(EXIT_FAULT, f"the parent broke the protocol: {error}", engine)
    exit_process(EXIT_PARENT_GONE, "the parent is gone", engine)


if __name__ == "__main__":
    main(sys.argv[1:])

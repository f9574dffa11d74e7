"""The engine's own process: ``python -m actors.engine.spark.child FD``.

The parent passes one end of a socket pair and sends `EngineStart`; the child starts Spark and
answers `EngineReady`. From then on the main thread only reads. Jobs go to a bounded set of worker
threads, each with its own sessions and its own fair scheduler pool. A worker writes its answer as a
single frame.

The process ends at end of file on the socket (the parent is gone), when its JVM exits, when its
Spark context stops in a running JVM (a cluster's master removed the application), or when its Spark
Connect server does not answer. The parent then starts a successor and sends it the same jobs, so
the process holds no state that the parent could not send again. The child's own JVM ends with the
process, because it reads from a pipe that the process holds open.
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
"""Number of checks, `PROGRESS_SECONDS` apart, after which a job that waits for a core gets one."""
WATCHER_SECONDS: Final = 2.0
LEFTOVER_BYTES_MAX: Final = 256 * 1024
LEFTOVER_JOBS_MAX: Final = 64
"""Number of jobs after which their garbage is collected, however small they were."""
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
        """Return the next message, with its trace context; None if the parent is gone."""
        while True:
            header = self._exactly(HEADER.size)
            if header is None:
                return None
            self.frame_bytes = length = self._codec.check_length(header)
            if length:
                body = self._exactly(length)
                return None if body is None else self._codec.decode(body)

    def send(self, answer: Answer) -> int:
        """Send an answer, or an error in its place if it is too large. Return the number of bytes
        sent."""
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
    """Passes jobs to worker threads: of the idle ones, to the one that became idle last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Jobs that no thread was free for, oldest first.
        self._waiting: deque[JobTicket] = deque()
        # The boxes of idle threads, the one that became idle last at the end.
        self._resting: list[queue.SimpleQueue[JobTicket]] = []

    def put(self, ticket: JobTicket) -> None:
        """Pass a job to an idle thread, or queue it."""
        with self._lock:
            if self._resting:
                # The sessions of the last thread are warm: jobs that come one at a time all go to
                # it.
                self._resting.pop().put(ticket)
            else:
                self._waiting.append(ticket)

    def take(self, box: queue.SimpleQueue[JobTicket]) -> JobTicket:
        """Return the next job for the thread that owns `box`; wait until there is one."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._resting.append(box)
        return box.get()


class SpareTasks:
    """Detects jobs that wait for long tasks of other jobs and need an extra core. Pure.

    Tasks are not preempted. So if a view is being filled for an hour, with as many tasks as there
    are cores, no other view would get its first contents.
    """

    def __init__(self, tasks_max: int) -> None:
        # Number of tasks that may still be added.
        self._left = tasks_max
        self._waited: dict[str, int] = {}
        """Number of consecutive checks at which no task of a job was running, although it had tasks
        left."""

    def is_short(self, counts: Mapping[str, TaskCounts]) -> bool:
        """Record the tasks of all jobs at a check; return whether to run an additional task."""
        idle = [
            group for group, each in counts.items() if not each.running and each.done < each.total
        ]
        if len(idle) == len(counts):
            idle = []  # No job occupies the cores.
        self._waited = {group: self._waited.get(group, 0) + 1 for group in idle}
        if self._left == 0 or max(self._waited.values(), default=0) < WAITING_LOOKS:
            return False
        self._left -= 1
        self._waited.clear()
        return True


class EngineChild:
    """Runs the jobs of a `SparkEngine` on worker threads."""

    def __init__(self, wire: ChildSocket, engine: SparkEngine) -> None:
        self._wire = wire
        self._engine = engine
        # The prepared plan of each dataflow, until `ForgetPlan`.
        self._plans: dict[str, PreparedPlan] = {}
        # The jobs that are queued or running, by id.
        self._tickets: dict[str, JobTicket] = {}
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        """Held while a job's progress is sent, so that the job does not end meanwhile."""
        self._jobs = JobDispatcher()
        # Set when a job is canceled, to wake the thread that interrupts Spark.
        self._wake = threading.Event()
        # Number of jobs received so far.
        self._serial = 0
        # Number of jobs that ended since the last collection, and the size of their messages and
        # answers.
        self._left_jobs = self._left_bytes = 0
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._watcher.start()
        threading.Thread(target=self._cancel, name="cancel", daemon=True).start()
        threading.Thread(target=self._report_progress, name="progress", daemon=True).start()
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
                    raise PenstockError("received Start twice")
                case _:
                    self._accept(message, traced=traceparent is not None)

    def _accept(self, job: Job, *, traced: bool = False) -> None:
        prepared = None
        if isinstance(job, PreparePlan):
            # Recorded by the reading thread, so that a step that follows its `PreparePlan` always
            # finds the plan.
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
                with self._reporting, self._lock:
                    del self._tickets[ticket.job.job_id]
                carried = ticket.bytes + self._wire.send(answer)
                del ticket, answer  # An idle thread must not keep rows alive.
                self._collect_after(carried)
                _bound_log()
        except OSError:
            exit_process(EXIT_PARENT_GONE, "the parent is gone", self._engine)
        except BaseException as error:  # noqa: BLE001 - a worker's fault ends the process
            exit_process(
                EXIT_FAULT, f"{pool} failed: {type(error).__name__}: {error}", self._engine
            )

    def _collect_after(self, carried: int) -> None:
        """Free what ended jobs left behind in Spark's JVM, after many jobs or after large ones.

        Each Java object with a method that Python called is in a reference cycle. Only Python's
        cycle collector frees it, and by its own count of objects it would run after hundreds of
        jobs; until then the JVM keeps their plans and all rows in them.
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
        """Return the answer to a job. Ends this process if Spark ended during the job."""
        started = time.time_ns()
        try:
            answer = self._engine.run(slot, ticket, pool)
            if is_traced(ticket):
                answer = traced(self._engine, ticket.group, (started, time.time_ns()), answer)
            return answer
        except SparkGone as error:
            if self._engine.lost():
                # If the JVM exited, the watcher knows its exit status and ends the process with it.
                self._watcher.join(WATCHER_SECONDS)
                exit_process(EXIT_SPARK_GONE, f"Spark is gone: {error}", self._engine)
            # Spark is alive; only this call failed.
            return JobFailed(ticket.job.job_id, "EngineLost", str(error))

    def _report_progress(self) -> None:
        """Send the progress of long-running jobs whenever it has changed."""
        sent: dict[str, tuple[int, int, int | None]] = {}
        cores = SpareTasks(self._engine.settings.engine_spare_tasks_max)
        try:
            while True:
                threading.Event().wait(PROGRESS_SECONDS)
                with self._lock:
                    groups = {ticket.group: job_id for job_id, ticket in self._tickets.items()}
                # Only groups that were also seen in the last round: their jobs have been running
                # for a while.
                counts: dict[str, TaskCounts] = {}
                for group, job_id in groups.items():
                    counted = self._engine.progress(group) if group in sent else None
                    if counted is not None:
                        counts[group] = counted
                    found = None if counted is None else counted[:3]
                    if found is not None and found != sent[group]:
                        # Under the lock that `_work` takes to end a job, so that no progress
                        # follows the job's answer.
                        with self._reporting:
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
            print(f"progress is no longer reported: {error}", file=sys.stderr, flush=True)

    def _watch_disk(self) -> None:
        """Cancel the running queries if they take too much disk space."""
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
            # Repeat until the worker has returned, since Spark forgets a cancellation that arrives
            # before the job.
            threading.Event().wait(CANCEL_AGAIN_SECONDS)

    def _watch(self) -> None:
        why = self._engine.wait_gone()
        exit_process(EXIT_SPARK_GONE, why, self._engine)


START_POLL_MS: Final = 500


def exit_process(code: int, why: str, engine: SparkEngine | None) -> None:
    """End this process now, together with everything that it started."""
    print(why, file=sys.stderr, flush=True)
    try:
        if engine is not None:
            engine.end()
    finally:
        # Immediately, since other threads may be inside calls that never return.
        os._exit(code)


def leave_with_parent(end: socket.socket, started: threading.Event) -> None:
    """End this process if the parent is gone before Spark has started."""
    hung_up = select.poll()
    hung_up.register(end, select.POLLRDHUP)
    # Nothing reads the socket yet, and the next service empties the folder in which Spark's JVM
    # leaves its port, so this process would wait for that forever.
    while not started.is_set():
        if hung_up.poll(START_POLL_MS):
            exit_process(EXIT_PARENT_GONE, "the parent is gone while Spark starts", None)


def _bound_log() -> None:
    """Empty the log if it is full."""
    try:
        # A job that fails again and again must not fill the disk.
        if os.fstat(2).st_size > LOG_BYTES_MAX:
            os.ftruncate(2, 0)
    except OSError:
        return  # Not a file.


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
        # Imported here, since the packages of Spark Connect need not be installed for any other
        # master.
        from actors.engine.spark.remote import open_remote

        return open_remote(settings, scratch, class_archive, no_java)
    conf = spark_conf(settings, scratch, class_archive, defaults)
    token = ""
    if settings.connect_listen:
        # The JVM inherits the token: other users of this machine must not be able to bypass the
        # gateway.
        token = os.environ[CONNECT_TOKEN] = secrets.token_hex(32)
    chosen = frozenset(settings.spark_conf) | frozenset(defaults)
    return SparkEngine(open_session(conf, scratch), settings, scratch, token, chosen)


def main(arguments: list[str]) -> None:
    """Run the child until its parent or its Spark is gone."""
    end = socket.socket(fileno=int(arguments[0]))
    # The JVM must not keep the socket open after this process has ended.
    end.set_inheritable(False)
    first = ChildSocket(end, 1 << 20).receive()
    if not isinstance(first, EngineStart):
        exit_process(EXIT_PARENT_GONE, "no Start came", None)
        return
    # The files that Spark writes contain rows: no other user may read them, whatever the umask of
    # the service.
    os.umask(0o077)
    settings, scratch = first.settings, Path(first.scratch)
    logging.getLogger("SQLQueryContextLogger").disabled = True
    # PySpark makes a folder for the port of its JVM, and leaves it behind if this process is
    # killed.
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
    # Objects made at the start are permanent: excluding them makes collections after jobs take only
    # a few milliseconds.
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

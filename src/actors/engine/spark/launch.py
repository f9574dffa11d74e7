"""The parent's side of a child: starts it, talks to it, and ends it with everything that it
started.

The child gets one end of a socket pair, and a log file for its own output and that of the JVM. If
it does not start, the error contains the tail of the log.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import anyio

from actors.engine.spark.class_archive import exclude_archive, find_archive
from actors.engine.spark.cores import cores
from actors.engine.spark.engine_start import CHILD_FOLDER, OUT_FOLDER, ChildMessage, EngineStart
from actors.engine.spark.environment import engine_environment
from actors.engine.spark.java import JavaHome, find_java
from actors.engine.spark.remote_address import is_remote, on_loopback, strip_parameters
from actors.engine.spark.spark_defaults import read_defaults
from actors.engine.spark.spark_releases import check_release, installed_version
from actors.model.plan.jobs import Answer, EngineReady
from actors.runtime.errors import EngineUnavailable
from actors.runtime.frames import HEADER, FrameCodec
from actors.runtime.kernel.clock import ActorClock
from actors.runtime.settings import Settings
from actors.runtime.telemetry import TracedMessage, split_context

LOG_TAIL_BYTES: Final = 2000
LOG_READ_BYTES: Final = 256 * 1024
"""Length of the end of the log that is searched for a JVM's last words; other output may follow
them."""
RELEASE_SECONDS: Final = 4.0
"""Time for the child of a Spark Connect server to release its sessions there."""
READ_BYTES_MAX: Final = 4 * 1024 * 1024
_WHY: Final = {
    0: "its parent closed the connection",
    3: "Spark is gone: its JVM exited, its context stopped, or its server does not answer",
    4: "Spark did not start",
    5: "an internal error",
}
"""Meanings of the exit statuses of `actors.engine.spark.child`."""
_JVM_KILLED: Final = f"the JVM exited with status {-signal.SIGKILL}"
_TELLING: Final = re.compile(
    r"^(?:Terminating due to |# +(?:SIG|There is insuff)|the JVM exited with status -).*$", re.M
)
"""Log lines in which a JVM reports its own end, or its parent the signal that ended it."""


class EngineProcess:
    """A child process."""

    why: str = ""
    """Why it ended; set by `end`."""
    killed_outside = False
    """True if a SIGKILL ended it or its JVM; set by `end`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        settings: Settings,
        scratch: Path,
        clock: ActorClock,
        archive: Path | None = None,
        log_start: int = 0,
    ) -> None:
        """Wrap a started process. `log_start`: the offset at which its own output starts in the
        log, which it shares with its predecessors."""
        self._archive = archive
        self._process = process
        self._reader, self._writer = streams
        self._settings = settings
        self._scratch = scratch
        self._clock = clock
        # True once `kill` was called.
        self._killed = False
        self._log_start = log_start
        limit = settings.engine_frame_bytes_max
        self._out: FrameCodec[ChildMessage] = FrameCodec(ChildMessage, limit)
        self._in: FrameCodec[Answer] = FrameCodec(Answer, limit)

    @property
    def pid(self) -> int:
        """Return the child's process id, which is also its process group."""
        return self._process.pid

    def send(self, message: ChildMessage | TracedMessage[ChildMessage]) -> None:
        """Send a message, with or without a trace context, without waiting.

        Raises `LocalProtocolError` if the message exceeds the frame limit.
        """
        data = self._out.encode(message)
        # No backpressure is needed: the jobs in flight are bounded, and the child always reads.
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> Answer | None:
        """Return the next answer; None if the child is gone."""
        try:
            length = self._in.check_length(await self._reader.readexactly(HEADER.size))
            body = await self._reader.readexactly(length)
            answer: Answer = split_context(self._in.decode(body))[0]
            return answer
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def ready(self) -> EngineReady:
        """Wait until the engine is up, and return its message. Raises `EngineUnavailable` with the
        tail of the log."""
        seconds = self._settings.engine_start_timeout_ms / 1000
        try:
            async with asyncio.timeout(seconds):
                first = await self.receive()
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine did not start within {seconds} s (engine_start_timeout_ms); its log"
                f" ends:\n{await self._log_tail()}"
            ) from None
        if not isinstance(first, EngineReady):
            # The JVM may have died of a damaged archive, so the next start does without it.
            if self._archive is not None:
                exclude_archive(self._archive)
            raise EngineUnavailable(
                f"the engine exited while starting; its log ends:\n{await self._log_tail()}"
            )
        return first

    def kill(self) -> None:
        """Kill the child and everything that it started, immediately."""
        if not self._killed:
            self._killed = True
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def end(self) -> None:
        """End the child, wait until it is gone, and remove its files, except its answers."""
        # At this end of file, the child of a Spark Connect server releases its sessions and exits.
        self._writer.transport.abort()
        spare = self._scratch / CHILD_FOLDER
        # Shielded, since a canceled caller must not leave a JVM behind.
        with anyio.CancelScope(shield=True):
            if is_remote(self._settings.spark_master) and not self._killed:
                with anyio.move_on_after(RELEASE_SECONDS):
                    await self._process.wait()
            self.kill()
            status = await self._process.wait()
            self.why = f"exit status {status}{': ' * (status in _WHY)}{_WHY.get(status, '')}"
            reasons = _TELLING.findall(await self._log_tail(LOG_READ_BYTES))
            if reasons:
                self.why += f" ({reasons[-1].strip()})"
            self.killed_outside = status == -signal.SIGKILL or _JVM_KILLED in reasons
            await self._clock.run_blocking(lambda: shutil.rmtree(spare, ignore_errors=True))

    async def _log_tail(self, bytes_max: int = LOG_TAIL_BYTES) -> str:
        path = log_path(self._scratch)
        data = await self._clock.run_blocking(path.read_bytes)
        # If the log was emptied, all of it.
        mine = data[self._log_start :] if len(data) >= self._log_start else data
        return mine[-bytes_max:].decode(errors="replace").strip()


def log_path(directory: Path) -> Path:
    """Return the path of the log of a folder's children."""
    return directory / "engine.log"


def make_clean_folder(directory: Path) -> None:
    """Create the engine's folder, or remove what earlier children left in it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (CHILD_FOLDER, OUT_FOLDER):
        shutil.rmtree(directory / name, ignore_errors=True)


def _java_and_archive(directory: Path) -> tuple[JavaHome, Path | None]:
    java = find_java(directory / "java")
    if not isinstance(java, JavaHome):
        raise java
    return java, find_archive(java)


async def launch(settings: Settings, directory: Path, clock: ActorClock) -> EngineProcess:
    """Start a child; `EngineProcess.ready` waits for it.

    Raises `EngineUnavailable` if PySpark is of an unsupported release, there is no Java,
    `spark-defaults.conf` cannot be read, or the process cannot be started, and `BadSettings` if the
    address of a Spark Connect server is malformed.
    """
    java: JavaHome | None = None
    archive, no_java = None, ""
    check_release(installed_version())
    if is_remote(settings.spark_master):
        # Raises for a malformed address before there is a process.
        strip_parameters(settings.spark_master)
    try:
        java, archive = await clock.run_blocking(lambda: _java_and_archive(directory))
    except EngineUnavailable as error:
        if not is_remote(settings.spark_master):
            raise
        no_java = str(error)
    defaults = await clock.run_blocking(lambda: read_defaults(os.environ))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    # O_APPEND: the child empties a full log, and later writes must start at its new end.
    log = os.open(log_path(directory), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    log_start = os.fstat(log).st_size
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "actors.engine.spark.child", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=engine_environment(
                os.environ, settings, java, here=on_loopback(settings.spark_master)
            ),
            # In a process group of its own, so that killing it also ends the JVM, even if neither
            # reads its pipe.
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise EngineUnavailable(f"cannot start the engine's process: {error}") from None
    finally:
        # Only the child holds its end, so that its death is an end of file here.
        theirs.close()
        os.close(log)
    try:
        # Set before it has threads: they and the JVM inherit both.
        if settings.engine_niceness:
            os.setpriority(os.PRIO_PROCESS, process.pid, settings.engine_niceness)
        if settings.pin_cores:
            os.sched_setaffinity(process.pid, cores().engine)
        streams = await asyncio.open_unix_connection(sock=ours, limit=READ_BYTES_MAX)
        made = EngineProcess(process, streams, settings, directory, clock, archive, log_start)
        made.send(EngineStart(settings, str(directory), str(archive or ""), no_java, defaults))
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        ours.close()
        raise
    return made

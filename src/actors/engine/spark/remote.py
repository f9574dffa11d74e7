"""The engine for a Spark Connect server. The engine's own Spark reads plans and executes prepared
steps (`actors.engine.spark.plan_reader`).

The server is shared and does not belong to Penstock: nothing is started there, only session
settings are changed, and sessions are released at the end. Worker threads have their own
sessions. Rows travel both ways as Arrow over the wire; the server reads parts that are too large
for that by their paths.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from actors.engine.spark.failures import is_forgotten, short_text
from actors.engine.spark.jobs import JobTicket, SparkEngine, run_job
from actors.engine.spark.plan_reader import READ_SETTINGS, PlanReader
from actors.engine.spark.remote_address import redact_secrets, strip_parameters
from actors.engine.spark.session import CONNECT_SETTINGS, ThreadSessions, cluster_partitions_max
from actors.engine.spark.spark_releases import another_session, check_server, limit_calls
from actors.engine.spark.steps import ThreadSlot
from actors.model.plan.jobs import Answer, EngineReady, JobFailed
from actors.runtime.errors import EngineUnavailable
from actors.runtime.settings import Settings

# Before the import, when gRPC reads it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
try:
    import pyspark
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.session import SparkSession

    from actors.engine.spark.connect import (
        TRIES_AGAIN,
        ConnectSessions,
        ServerCores,
        set_retries,
        set_settings,
    )
except ImportError as error:
    raise EngineUnavailable(
        f"Spark Connect needs additional packages: pip install 'penstock-views[connect]' ({error})"
    ) from None

_DETAILS: Final = re.compile(r'details = "([^"]+)"')
PING_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 30.0
"""Deadline for a call that is not a job."""
START_TRIES_AGAIN: Final = 2
"""Number of retries at the start; few, since the parent starts other children with increasing
delays."""
RELEASE_SECONDS: Final = 2.0
"""Time to release all sessions at the end."""


class RemoteEngine(SparkEngine):
    """A `SparkEngine` whose sessions are behind Spark Connect."""

    def __init__(
        self,
        root: SparkSession,
        settings: Settings,
        scratch: Path,
        base: Mapping[str, str],
        reader: PlanReader,
    ) -> None:
        super().__init__(root, settings, scratch)
        self._reader = reader
        self._root = root
        self._base = base
        self._cores = ServerCores()
        self._place = strip_parameters(settings.spark_master)
        # The sessions of all worker threads.
        self._all: list[ConnectSessions] = []
        # The sessions in which jobs are running, by the jobs' groups.
        self._running: dict[str, ConnectSessions] = {}
        # True once the server was found to be gone.
        self._gone = False
        # True once `end` was called.
        self._ending = False

    def ready(self) -> EngineReady:
        """Return the message that tells the parent that Spark is up."""
        return EngineReady("", self._root.version, "", os.getpid(), 0)

    def run(self, slot: ThreadSlot, ticket: JobTicket, pool: str) -> Answer:
        """Return the answer to a job (see `SparkEngine.run`), without the secrets of the server's
        address."""
        answer = super().run(slot, ticket, pool)
        if isinstance(answer, JobFailed):
            # An error may quote the address, with its secrets.
            text = redact_secrets(answer.text, self.settings.spark_master)
            return msgspec.structs.replace(answer, text=text)
        return answer

    def progress(self, group: str) -> None:
        """Return None, since the progress of remote jobs is not known."""

    def add_task(self) -> bool:
        """Return False, since the engine cannot change the cores of a server."""
        return False

    def interrupt(self, group: str) -> None:
        """Interrupt what a job is running, if it is running anything."""
        self._reader.cancel(group)
        sessions = self._running.get(group)
        if sessions is not None:
            sessions.interrupt(_tag(group))

    def wait_gone(self) -> str:
        """Wait until the server does not answer, or another server answers; return a text that says
        so."""
        never = threading.Event()
        while True:
            never.wait(PING_SECONDS)
            why = self._silent()
            if why is not None:
                return f"the Spark Connect server at {self._place} is gone: {why}"

    def lost(self) -> bool:
        """Return whether Spark will run no more jobs (see `SparkEngine.lost`)."""
        return self._reader.ended() or self._silent() is not None

    def end(self) -> None:
        """Release all sessions within `RELEASE_SECONDS`, which ends what runs in them."""
        self._ending = True
        self._reader.end()
        # A server that is gone does not answer a release.
        if self._gone:
            return
        done = threading.Thread(target=self._release, daemon=True)
        done.start()
        done.join(RELEASE_SECONDS)

    def _release(self) -> None:
        for sessions in self._all:
            sessions.end()
        self._root.stop()

    def _silent(self) -> str | None:
        """Return why the server is considered gone; None if it answers."""
        try:
            self._root.client.get_configs("spark.sql.session.timeZone")
        except Exception as error:  # noqa: BLE001 - any failure but one is silence
            if not is_forgotten(error):
                self._gone = True
                return _message(error)
            # The server answers, but has closed a session that was idle for a long time.
            self._root = _opened(another_session(self._root), {})
        return None

    def _sessions(self) -> ThreadSessions:
        made = ConnectSessions(
            self._root,
            self._user,
            self._temporary,
            self._base,
            self._reader,
            self._cores,
            cluster_partitions_max(self.settings),
        )
        self._all.append(made)
        return made

    def _carry_out(self, slot: ThreadSlot, ticket: JobTicket, pool: str) -> Answer:
        sessions = slot.sessions
        assert isinstance(sessions, ConnectSessions)
        # All calls of the job carry its tag, by which a cancellation interrupts them.
        sessions.begin(_tag(ticket.group))
        self._running[ticket.group] = sessions
        try:
            try:
                return run_job(slot, ticket)
            except PySparkException as error:
                if self._ending or not is_forgotten(error):
                    raise
            # The server closes sessions that are idle for a long time. Retrying in new sessions is
            # safe: a job is a pure function of its message.
            sessions.drop()
            return run_job(slot, ticket)
        finally:
            del self._running[ticket.group]


def open_remote(
    settings: Settings, scratch: Path, class_archive: str = "", no_java: str = ""
) -> RemoteEngine:
    """Connect to the server that `spark_master` names. `no_java`: why there is no Java here for
    reading plans; "" if there is one.

    Raises `BadSettings` for a malformed address, and `EngineUnavailable` if the server does not
    answer, is of another release, or rejects a setting.
    """
    place = strip_parameters(settings.spark_master)
    base = CONNECT_SETTINGS | dict(settings.spark_conf)
    try:
        root = _opened(SparkSession(settings.spark_master), base, START_TRIES_AGAIN)
        version = root.version
        set_retries(root)
    except Exception as error:  # noqa: BLE001 - there is no session, whatever it was
        text = redact_secrets(_message(error), settings.spark_master)
        raise EngineUnavailable(f"the Spark Connect server at {place}: {text}") from None
    check_server(place, version, pyspark.__version__)
    reader = PlanReader(settings, scratch, _chosen(root) | base, class_archive, no_java)
    return RemoteEngine(root, settings, scratch, base, reader)


def _opened(session: Any, conf: Mapping[str, str], tries_again: int = TRIES_AGAIN) -> SparkSession:
    limit_calls(session.client, ANSWER_SECONDS, RELEASE_SECONDS)
    set_retries(session, tries_again)
    set_settings(session, conf)
    return session


def _chosen(session: SparkSession) -> dict[str, str]:
    """Return the SQL settings that the server was started with, if a session can override them:
    with these, a text may mean something different than with Spark's defaults."""
    found = session.conf.getAll
    return {
        name: value
        for name, value in found.items()
        if name.startswith(READ_SETTINGS) and session.conf.isModifiable(name)
    }


def _message(error: Exception) -> str:
    """Return the message of an error, without what gRPC wraps around it."""
    # An older client only says that it has retried too often, and has the reason as its cause.
    for each in (error, error.__cause__):
        found = _DETAILS.search(str(each))
        if found is not None:
            return found.group(1)
    return short_text(str(error)) or type(error).__name__


def _tag(group: str) -> str:
    # Spark Connect does not allow commas in tags.
    return group.replace(",", " ")

"""Makes sources, sinks and copies from their configurations.

Configurations are opaque bytes to the controller and to the storage protocol. Only this module
decodes them.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from actors.connectors.oneshot_task import OneshotReading
from actors.connectors.sink_task import SinkTask
from actors.connectors.sinks import kinds as sink_kinds
from actors.connectors.sinks.messages import SinkWork
from actors.connectors.sinks.sink import SinkConnector
from actors.connectors.sources import kinds as source_kinds
from actors.connectors.sources.oneshot import CopyFromConfig, OneshotCopy
from actors.connectors.sources.source import (
    ConnectorContext,
    SourceConnector,
    check_configuration,
)
from actors.connectors.storage_connectors import StorageConnectors
from actors.durable.persist import PersistClient
from actors.model.plan.jobs import Answer, CancelJob, ExecutorMessage, Job, SubmitJob
from actors.model.protocol.storage import (
    ConnectorConfiguration,
    RunOneshotIngestion,
    SinkDescription,
)
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import Actor, ActorAddress, ActorClock
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings


class ConnectorFactory:
    """Makes sources, sinks and copies from files. Implements
    `controller.catalog.connector_ddl.ConnectorMakers`."""

    def __init__(
        self,
        settings: Settings,
        clock: ActorClock,
        random: Random,
        executor: ActorAddress[ExecutorMessage],
        scratch: Path,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._random = random
        self._executor = executor
        self._scratch = scratch
        # Numbers that make ids of jobs and names of scratch folders unique within the process.
        self._jobs = count(1)
        self._tasks = count(1)

    def source(self, configuration: ConnectorConfiguration, id: ObjectId) -> SourceConnector:
        """Return a source that is not open yet. Raises `InvalidUsage` for an invalid
        configuration."""
        config = source_kinds.decode(configuration.encoded)
        scratch = self._scratch / f"source-{id}-{next(self._tasks)}"
        around = ConnectorContext(self._clock, self._settings, scratch, self._run_job, id)
        return source_kinds.make_source(config, around)

    def new_source(
        self, kind: str, config: bytes, *, privileged: bool = True
    ) -> ConnectorConfiguration:
        """Return the configuration of a new source from the user's JSON.

        Raises `InvalidUsage` for an invalid configuration. Unless `privileged`, raises
        `AccessDenied` when it would send a secret to a host that is not listed for that secret.
        """
        if kind not in source_kinds.KINDS:
            known = ", ".join(source_kinds.KINDS)
            raise InvalidUsage(f"unknown kind of source {kind!r} (available: {known})")
        source_kinds.check_names(config, kind)
        found = source_kinds.decode(config)
        if source_kinds.kind_of(found) != kind:
            raise InvalidUsage(
                f"the type in this configuration does not match the source's kind {kind!r}"
            )
        if not privileged:
            source_kinds.check_new(found, self._settings)
        # A random token: a source's id is unique in this service only, and a slot's name must be
        # unique on its server.
        token = f"{self._random.getrandbits(48):012x}"
        return ConnectorConfiguration(kind, source_kinds.encode(found.with_token(token)))

    def external_resource(self, configuration: ConnectorConfiguration, id: ObjectId) -> str:
        """Return the name of the external resource (a replication slot) to remove with the source;
        "" if there is none."""
        return source_kinds.decode(configuration.encoded).external_resource(id)

    def options(self, configuration: ConnectorConfiguration, *, of_sink: bool) -> bytes:
        """Return the options of a source or sink that differ from their defaults, as JSON."""
        # Both modules define `decode` and `OURS`.
        kinds = sink_kinds if of_sink else source_kinds
        config, ours = kinds.decode(configuration.encoded), kinds.OURS
        given = {
            field.name: getattr(config, field.name)
            for field in msgspec.structs.fields(config)
            if field.name not in ours and getattr(config, field.name) != field.default
        }
        return msgspec.json.encode(given)

    def oneshot(self, oneshot: RunOneshotIngestion) -> OneshotReading:
        """Return a reader of the files of a one-shot ingestion, not prepared yet. Raises
        `InvalidUsage`."""
        check_configuration(oneshot.request.encoded)
        try:
            request = msgspec.json.decode(oneshot.request.encoded, type=CopyFromConfig)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidUsage(f"invalid configuration of a copy from files: {error}") from None
        scratch = self._scratch / f"copy-{oneshot.uuid}-{next(self._tasks)}"
        around = ConnectorContext(self._clock, self._settings, scratch, self._run_job, oneshot.uuid)
        return OneshotCopy(request, oneshot.schema, around)

    async def _run_job(self, job: Job) -> Answer:
        """Run a job on the engine and return its answer. Cancelling the caller cancels the job."""
        # Ids that sources choose may collide; the executor needs ids that are unique in the
        # process.
        named: Any = msgspec.structs.replace(job, job_id=f"outside/{next(self._jobs)}")
        done = False
        try:
            answer: Answer = await self._executor.ask(lambda reply: SubmitJob(named, reply))
            done = True
            return answer
        finally:
            if not done:
                self._executor.reply(CancelJob(named.job_id))

    def sink(self, configuration: ConnectorConfiguration, id: ObjectId) -> SinkConnector:
        """Return a sink that is not open yet. Raises `InvalidUsage` for an invalid
        configuration."""
        config = sink_kinds.decode(configuration.encoded)
        scratch = self._scratch / f"sink-{id}-{next(self._tasks)}"
        return sink_kinds.make_sink(config, id, self._settings, self._clock, self._random, scratch)

    def new_sink(self, kind: str, options: bytes) -> ConnectorConfiguration:
        """Return the configuration of a new sink from the user's JSON. Raises `InvalidUsage`."""
        check_configuration(options)
        try:
            given = msgspec.json.decode(options or b"{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidUsage(f"invalid options of a sink: {error}") from None
        # Distinguishes this sink's commits from those of a dropped sink with the same id.
        creation = f"{self._random.getrandbits(128):032x}"
        config = sink_kinds.config_of(kind, given, creation)
        return ConnectorConfiguration(kind, sink_kinds.encode(config))

    def half(self, persist: PersistClient) -> StorageConnectors:
        """Return the factories that the storage half of a worker uses."""

        def sink_task(
            description: SinkDescription, number: int, owner: ActorAddress[Any]
        ) -> Actor[Any]:
            work = SinkWork(
                description.id,
                description.name,
                description.input.shard,
                description.input.schema,
                sink_kinds.decode(description.configuration.encoded),
                description.as_of,
            )
            scratch = self._scratch / f"sink-{description.id}-{next(self._tasks)}"
            return SinkTask(work, number, persist, self._settings, owner, scratch, writable=True)

        return StorageConnectors(self.source, sink_task, self._scratch, self.oneshot)

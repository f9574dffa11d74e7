"""Runs the pipelines of `spark-pipelines`, whose datasets become views of the service.

A client sends the definitions one by one, then starts a run. A run checks all definitions before it
changes anything. Then it executes `CREATE OR REPLACE` for each, in dependency order, and waits for
its contents. An unchanged definition has no effect, so a second run costs little. A refresh, full
or not, does nothing more, because maintained views are always up to date.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Final

from google.protobuf import timestamp_pb2
from pyspark.sql.connect.proto import base_pb2

from actors.control.controller.catalog.catalog import CatalogObject
from actors.doors.connect_gateway.error_status import unsupported
from actors.doors.connect_gateway.gateway_sessions import GatewaySession
from actors.doors.connect_gateway.local_operations import AnswerStream
from actors.doors.connect_gateway.object_catalog import ObjectDirectory, SharedClient
from actors.doors.connect_gateway.pipeline_graph import (
    DataflowGraph,
    PipelineDataset,
    statement_of_dataset,
)
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.doors.connect_gateway.row_messages import complete_answer
from actors.doors.connect_gateway.spark_calls import SparkCalls
from actors.doors.connect_gateway.statement_execution import ExecuteStatement
from actors.engine.spark.spark_releases import pipeline_messages
from actors.model.protocol.relations import fold
from actors.runtime.errors import (
    AccessDenied,
    EngineLost,
    InvalidUsage,
    OperationCanceled,
    PenstockError,
    ResourceBusy,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings

pipelines_pb2: Final = pipeline_messages()
GRAPHS_MAX: Final = 16
"""Maximum number of pipelines that one session may have defined at a time."""
_KINDS: Final = ("materialized view", "view", "temporary view")
_TOLD_AS_THEY_ARE: Final = (AccessDenied, EngineLost, OperationCanceled, ResourceBusy)
"""Errors whose class is significant to clients and is preserved."""


def defines_pipeline(request: ProtoMessage) -> bool:
    """Return whether a request comes from code that defines a pipeline."""
    if pipelines_pb2 is None:
        return False  # Spark before 4.1 has no pipelines
    kind = pipelines_pb2.PipelineAnalysisContext.DESCRIPTOR
    return any(each.Is(kind) for each in request.user_context.extensions)


class PipelineCommands:
    """Executes the commands of pipelines."""

    def __init__(
        self,
        settings: Settings,
        clock: ActorClock,
        directory: ObjectDirectory,
        client: SharedClient,
        calls: SparkCalls,
        execute: ExecuteStatement | None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._directory = directory
        self._client = client
        self._calls = calls
        self._execute = execute

    def answers(self, session: GatewaySession, command: ProtoMessage) -> Callable[[], AnswerStream]:
        """Handle a `PipelineCommand`, and return the source of its answers.

        Definitions take effect immediately, a run when the answers are consumed. Raises
        `SparkCondition` for unsupported commands, and `InvalidUsage`.
        """
        kind = command.WhichOneof("command_type")
        match kind:
            case "create_dataflow_graph":
                made = _create(session, command.create_dataflow_graph)
                told = pipelines_pb2.PipelineCommandResult()
                told.create_dataflow_graph_result.dataflow_graph_id = made
                return lambda: _of_result(told)
            case "drop_dataflow_graph":
                session.pipelines.pop(command.drop_dataflow_graph.dataflow_graph_id, None)
                return lambda: _of_result(None)
            case "define_output":
                defined = _graph_of(session, command.define_output).define_output(
                    command.define_output
                )
                return lambda: _of_result(_identified("define_output_result", defined))
            case "define_flow":
                defined = _graph_of(session, command.define_flow).define_flow(command.define_flow)
                return lambda: _of_result(_identified("define_flow_result", defined))
            case "define_sql_graph_elements":
                texts = command.define_sql_graph_elements
                _graph_of(session, texts).define_texts(texts)
                return lambda: _of_result(None)
            case "start_run":
                graph = _graph_of(session, command.start_run)
                start = command.start_run
                return lambda: self._run(session, graph, start)
        raise unsupported(f"The pipeline command {kind} is not supported by Penstock.")

    # -- a run ---------------------------------------------------------------------------------

    async def _run(
        self, session: GatewaySession, graph: DataflowGraph, start: ProtoMessage
    ) -> AnswerStream:
        """Execute a `StartRun`, and yield its events. Raises the error of the first dataset that
        fails."""
        yield _result_answer(None)
        order = graph.ordered()
        named = [*start.full_refresh_selection, *start.refresh_selection]
        chosen = graph.chosen(named, all_of_them=start.full_refresh_all or not named)
        flows = [each for each in order if each.lasting and fold(each.name) in chosen]
        if not flows:
            raise InvalidUsage("the pipeline has no datasets to create: it is empty, or contains "
                               "only temporary views")  # fmt: skip
        for each in flows:
            yield self._event(f"Flow '{each.shown}' is QUEUED.")
        for each in order:
            try:
                await self._check(session, graph, order, each)
            except PenstockError as error:
                yield self._event(f"Failed to resolve flow: '{each.shown}'.")
                yield self._event("Run is FAILED.")
                raise _of_dataset(each, error) from error
        if not start.dry:
            if start.full_refresh_all or start.full_refresh_selection:
                yield self._event(
                    "A full refresh recomputes nothing, because materialized views of Penstock are "
                    "always up to date."
                )
            yield self._event("Run is RUNNING.")
            failed: PenstockError | None = None
            async for told in self._define_all(session, graph, order, flows):
                if isinstance(told, PenstockError):
                    failed = failed or told
                else:
                    yield self._event(told)
            if failed is not None:
                yield self._event("Run is FAILED.")
                raise failed
        yield self._event("Run is COMPLETED.")
        yield complete_answer()

    async def _define_all(
        self,
        session: GatewaySession,
        graph: DataflowGraph,
        order: list[PipelineDataset],
        flows: list[PipelineDataset],
    ) -> AsyncIterator[str | PenstockError]:
        """Define the datasets `flows` in order. Yield messages for events, and errors."""
        lost: set[str] = set()
        for each in flows:
            if lost & graph.reads(each):
                lost.add(fold(each.name))
                yield f"Flow '{each.shown}' SKIPPED due to upstream failure(s)."
                continue
            yield f"Flow '{each.shown}' is RUNNING."
            try:
                how = await self._define(session, graph, order, each)
            except PenstockError as error:
                lost.add(fold(each.name))
                yield f"Flow '{each.shown}' has FAILED."
                # Continue with the datasets that do not depend on it.
                yield _of_dataset(each, error)
            else:
                yield f"Flow '{each.shown}' has COMPLETED ({how})."

    async def _check(
        self,
        session: GatewaySession,
        graph: DataflowGraph,
        order: list[PipelineDataset],
        dataset: PipelineDataset,
    ) -> None:
        """Check a dataset by letting the service plan it, without any change. Raises the service's
        errors."""
        query = graph.query_with(dataset, order, _KINDS)
        alone = query == graph.query_with(dataset, order)
        if dataset.kind == "materialized view" and alone:
            # Only without other datasets inlined is this the plan that the view will have.
            created = statement_of_dataset(dataset, query)
            await self._carry_out(f"EXPLAIN INCREMENTAL {created}", session)
        else:
            await self._carry_out(f"EXPLAIN INCREMENTAL {query}", session)

    async def _define(
        self,
        session: GatewaySession,
        graph: DataflowGraph,
        order: list[PipelineDataset],
        dataset: PipelineDataset,
    ) -> str:
        """Create or replace a dataset, and wait for its contents. Return "created", "changed" or
        "unchanged"."""
        before = await self._entry(dataset)
        query = graph.query_with(dataset, order)
        await self._carry_out(statement_of_dataset(dataset, query), session)
        after = await self._entry(dataset)
        if dataset.kind == "materialized view":
            # Errors in the view's rows, such as a division by zero, fail the run.
            client = await self._client.get()
            limit_ms = self._settings.replace_deadline_ms
            await client.peek(dataset.name, limit=0, deadline_ms=limit_ms)
        if before is None:
            return "created"
        return "changed" if _definition(before) != _definition(after) else "unchanged"

    async def _entry(self, dataset: PipelineDataset) -> CatalogObject | None:
        names = (await self._directory.names()).with_plain()
        return names.entry(dataset.name)

    async def _carry_out(self, text: str, session: GatewaySession) -> None:
        conf = await self._calls.changed_settings(session)
        if self._execute is None or await self._execute(text, session.caller, conf) is None:
            raise InvalidUsage("the query does not read any Penstock object")

    def _event(self, message: str) -> ProtoMessage:
        moment = timestamp_pb2.Timestamp()
        moment.FromMilliseconds(self._clock.now_ms())
        answer = base_pb2.ExecutePlanResponse()
        event = answer.pipeline_event_result.event
        event.message = message
        event.timestamp.CopyFrom(moment)
        return answer


def _definition(entry: CatalogObject | None) -> object:
    """Return a value that differs if and only if the definition of an object has changed."""
    if entry is None:
        return None
    policy = None if entry.plan is None else entry.plan.policy
    kept = (entry.target_lag_ms, entry.retain_history_ms, entry.comment)
    return (entry.written, entry.conf, entry.dataflow_id, policy, *kept)


def _create(session: GatewaySession, command: ProtoMessage) -> str:
    """Store a new pipeline in the session, and return its id."""
    graph, name = DataflowGraph(command), str(uuid.uuid4())
    # Drop the oldest: clients may define pipelines repeatedly without dropping them.
    while len(session.pipelines) >= GRAPHS_MAX:
        del session.pipelines[next(iter(session.pipelines))]
    session.pipelines[name] = graph
    return name


def _graph_of(session: GatewaySession, command: ProtoMessage) -> DataflowGraph:
    graph = session.pipelines.get(command.dataflow_graph_id)
    if graph is None:
        raise InvalidUsage(f"pipeline {command.dataflow_graph_id!r} does not exist in this session")
    return graph


def _of_dataset(dataset: PipelineDataset, error: PenstockError) -> PenstockError:
    """Return an error that also names the dataset that caused it."""
    behind = f" ({dataset.place})" if dataset.place else ""
    told = f"pipeline dataset {dataset.name}{behind}: {error}"
    for kind in _TOLD_AS_THEY_ARE:
        if isinstance(error, kind):
            return kind(told)
    return InvalidUsage(told)


def _identified(field: str, dataset: PipelineDataset) -> ProtoMessage:
    told = pipelines_pb2.PipelineCommandResult()
    found = getattr(told, field).resolved_identifier
    found.catalog_name, found.table_name = "spark_catalog", dataset.name
    found.namespace.append("default")
    return told


def _result_answer(result: ProtoMessage | None) -> ProtoMessage:
    answer = base_pb2.ExecutePlanResponse()
    answer.pipeline_command_result.SetInParent()
    if result is not None:
        answer.pipeline_command_result.CopyFrom(result)
    return answer


async def _of_result(result: ProtoMessage | None) -> AnswerStream:
    yield _result_answer(result)
    yield complete_answer()

"""What a client may say, and in which order: checked at the edge, one connection at a time.

Rules: Hello, then CreateInstance (equal to the running instance), then anything; each of these
and InitializationComplete once; an id names one dataflow at a time; a result must fit a frame.
Commands about objects that are not there are let through: both sides tolerate what no longer
matches their view. Pure.
"""

from __future__ import annotations

from actors.errors import InvalidUsage, RemoteProtocolError
from actors.progress import TIME_MAX, ObjectId, is_empty
from actors.protocol.compute import (
    AllowCompaction,
    Command,
    CopyToExport,
    CreateDataflow,
    CreateInstance,
    Hello,
    InitializationComplete,
    Peek,
    UpdateConfiguration,
)


class CommandRules:
    """The state of one conversation."""

    def __init__(self, running: CreateInstance, frame_bytes_max: int) -> None:
        self._running = running
        self._frame_bytes_max = frame_bytes_max
        self._hello = False
        self._instance = False
        self._complete = False
        self._dataflows: set[ObjectId] = set()

    def check(self, command: Command) -> None:
        """Raises `RemoteProtocolError` when the command breaks the order, and `InvalidUsage`
        when it asks for what this instance is not; both end the connection."""
        name = type(command).__name__
        if isinstance(command, Hello):
            _require(not self._hello, "a connection says Hello once")
            _require(bool(command.nonce), "the nonce of Hello is empty")
            self._hello = True
            return
        _require(self._hello, f"{name} came before Hello")
        if isinstance(command, CreateInstance):
            self._check_instance(command)
            return
        _require(self._instance, f"{name} came before CreateInstance")
        match command:
            case InitializationComplete():
                _require(not self._complete, "a connection says InitializationComplete once")
                self._complete = True
            case CreateDataflow():
                self._check_dataflow(command)
            case AllowCompaction():
                if is_empty(command.frontier):
                    self._dataflows.discard(command.id)
            case UpdateConfiguration():
                self._check_configuration(command)
            case Peek():
                _require(bool(command.uuid), "the uuid of a Peek is empty")
                _require(0 <= command.time <= TIME_MAX, f"a Peek at {command.time}: no such time")

    def _check_instance(self, command: CreateInstance) -> None:
        _require(not self._instance, "a connection says CreateInstance once")
        if command != self._running:
            raise InvalidUsage(
                f"the client asks for an instance of {_describe(command)}, but this one has "
                f"{_describe(self._running)}: configure both alike"
            )
        self._instance = True

    def _check_dataflow(self, command: CreateDataflow) -> None:
        dataflow = command.dataflow
        _require(bool(dataflow.id), "the id of a dataflow is empty")
        _require(dataflow.id not in self._dataflows, f"dataflow {dataflow.id} exists already")
        _require(
            0 <= dataflow.as_of <= TIME_MAX,
            f"dataflow {dataflow.id} starts at {dataflow.as_of}: no such time",
        )
        if isinstance(dataflow.export, CopyToExport):
            raise InvalidUsage(f"dataflow {dataflow.id} is a copy: this cluster makes none")
        self._dataflows.add(dataflow.id)

    def _check_configuration(self, command: UpdateConfiguration) -> None:
        limit = command.result_bytes_max
        if limit is not None and not 0 < limit < self._frame_bytes_max:
            raise InvalidUsage(
                f"result_bytes_max = {limit}: must be above 0 and below frame_bytes_max "
                f"({self._frame_bytes_max}), because a result travels in a frame"
            )


def _describe(instance: CreateInstance) -> str:
    return f"{instance.workers} workers (version {instance.version})"


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise RemoteProtocolError(rule)

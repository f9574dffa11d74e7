"""A child process of the engine, spoken to synchronously over its socket; rows in and out."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

import actors
from actors.engine.spark.class_archive import find_archive
from actors.engine.spark.engine_start import EngineStart
from actors.engine.spark.java import JavaHome
from actors.model.plan.jobs import Answer, EngineReady, Job, JobProgress, RowsDone
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.runtime.frames import HEADER, FrameCodec
from actors.runtime.settings import Settings
from actors.runtime.telemetry import TracedMessage

WITH_CONSTANTS = """
import json, sys
from importlib import import_module
for name, value in json.loads(sys.argv[2]).items():
    module, constant = name.split(".")
    module = import_module(f"actors.engine.spark.{module}")
    assert getattr(module, constant) != value, name
    setattr(module, constant, value)
from actors.engine.spark.child import main
main(sys.argv[1:2])
"""
"""The child's program, with other constants."""


class ChildProcess:
    """A child and the parent's end of its socket, synchronously."""

    def __init__(
        self,
        scratch: Path,
        settings: Settings,
        java: JavaHome | None,
        *,
        archive: Path | None = None,
        constants: Mapping[str, int] | None = None,
        **env: str,
    ) -> None:
        """Start a child. `constants`: other values of constants of `actors.engine.spark`, each by
        its module and name."""
        scratch.mkdir(exist_ok=True)
        self.scratch = scratch
        self.settings = settings
        self.log = scratch / "child.log"
        ours, theirs = socket.socketpair()
        ours.settimeout(250)
        source = str(Path(next(iter(actors.__path__))).parent)
        home = {} if java is None else {"JAVA_HOME": str(java.home)}
        environment = os.environ | home | {"PYTHONPATH": source} | env
        program = ["-m", "actors.engine.spark.child", str(theirs.fileno())]
        if constants is not None:
            program = ["-c", WITH_CONSTANTS, str(theirs.fileno()), json.dumps(constants)]
        with self.log.open("ab") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, *program],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.socket = ours
        self.codec: FrameCodec[Answer] = FrameCodec(Answer, settings.engine_frame_bytes_max)
        if java is not None and archive is None:
            archive = find_archive(java)
        no_java = "" if java is not None else "this test has none"
        self.send(EngineStart(settings, str(scratch), str(archive or ""), no_java))
        ready = self.receive()
        assert isinstance(ready, EngineReady), self.log.read_text()
        self.ready = ready

    def send(self, message: Any) -> None:
        self.socket.sendall(self.codec.encode(message))

    def receive(self) -> Answer:
        while isinstance(answer := self.receive_any(), JobProgress):
            pass
        return answer

    def receive_any(self) -> Answer:
        length = self.codec.check_length(self._exactly(HEADER.size))
        answer: Any = self.codec.decode(self._exactly(length))
        assert not isinstance(answer, TracedMessage)
        found: Answer = answer
        return found

    def ask(self, job: Job) -> Any:
        self.send(job)
        answer = self.receive()
        assert answer.job_id == job.job_id
        return answer

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise EOFError(self.log.read_text())
            data += piece
        return data

    def close(self) -> None:
        self.socket.close()
        self.process.wait(200)


_NUMBERS = itertools.count()


def job_id() -> str:
    """A fresh job's name."""
    return f"j{next(_NUMBERS)}"


def updates(schema: TableSchema, rows: list[tuple[Any, ...]]) -> pa.Table:
    """Updates from tuples (columns…, time, diff)."""
    wanted = schema.arrow_updates()
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[] for _ in wanted]
    arrays = [pa.array(list(c), f.type) for c, f in zip(columns, wanted, strict=True)]
    return pa.Table.from_arrays(arrays, schema=wanted)


def ipc(schema: TableSchema, rows: list[tuple[Any, ...]]) -> bytes:
    """The same, as an IPC stream."""
    return to_ipc(updates(schema, rows))


def table_of(answer: Any) -> pa.Table:
    """The rows of an answer."""
    assert isinstance(answer, RowsDone), answer
    if answer.arrow is not None:
        return from_ipc(answer.arrow)
    assert answer.arrow_file is not None
    with pa.memory_map(answer.arrow_file) as source:
        table = pa.ipc.open_file(source).read_all()
    Path(answer.arrow_file).unlink()
    return table

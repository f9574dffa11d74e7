"""A child that is killed while its JVM starts leaves nothing outside of its scratch folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import actors
from actors.engine.spark.engine_start import CHILD_FOLDER, EngineStart
from actors.model.plan.jobs import Answer
from actors.runtime.frames import FrameCodec
from actors.runtime.settings import Settings


def test_it_leaves_nothing_where_the_machine_has_temporary_files(tmp_path: Path) -> None:
    scratch, elsewhere, java = (tmp_path / name for name in ("scratch", "elsewhere", "bin/java"))
    elsewhere.mkdir()
    java.parent.mkdir()
    java.write_text("#!/bin/sh\nexec sleep 600\n")  # a JVM that never starts
    java.chmod(0o755)
    settings = Settings()
    ours, theirs = socket.socketpair()
    source = str(Path(next(iter(actors.__path__))).parent)
    given = {"JAVA_HOME": str(tmp_path), "PYTHONPATH": source, "TMPDIR": str(elsewhere)}
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "actors.engine.spark.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | given,
            start_new_session=True,
        )
        try:
            codec: FrameCodec[Answer] = FrameCodec(Answer, settings.engine_frame_bytes_max)
            ours.sendall(codec.encode(EngineStart(settings, str(scratch), "", "")))
            patience = monotonic() + 250
            while not any((scratch / CHILD_FOLDER).glob("tmp/tmp*")):
                assert child.poll() is None
                assert monotonic() < patience
                sleep(0.05)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert list(elsewhere.iterdir()) == []

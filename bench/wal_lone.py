"""One small append by one connection, answered once it is on disk.

``wal_lone_append``: over a socket of a real ``penstock wal serve``, from the first byte sent to the
answer that reports it as durable, one after another, the median. The append is a record with 8
bytes of data plus the header, the smallest that an acceptor can report (it reports ends of
records). The peer is the limit of an append: 1.5 times what writing the same bytes to a separate
file and fdatasync take, in alternation with ours, plus 0.3 ms. The client is a blocking socket, so
the time is the acceptor's.

    python bench/wal_lone.py [--json FILE] [--quick]
"""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.simulators`
from actors.wal import codec_v3
from actors.wal.framing import MAGIC, START_LSN
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.messages import (
    AcceptorMessage,
    AppendRequest,
    AppendResponse,
    MembershipConfig,
    ProposerElected,
    ProposerGreeting,
    ProposerMessage,
    TermEntry,
    VoteRequest,
)
from measure import Measure, Report, median
from tests.simulators.wal.made_up import MadeUpLog

TENANT, TIMELINE = "0" * 31 + "1", "0" * 31 + "2"
PARAMETERS = {"user": "bench", "options": f"-c tenant_id={TENANT} timeline_id={TIMELINE}"}
DATA_BYTES = 8
SHARE, MORE_MS = 1.5, 0.3


@contextmanager
def acceptor(folder: Path, node_id: int) -> Iterator[int]:
    """Run an acceptor in a separate process while the block lasts, and yield its port."""
    command = [str(Path(sys.executable).parent / "penstock"), "wal", "serve"]
    command += ["--dir", str(folder), "--node-id", str(node_id)]
    command += ["--listen", "127.0.0.1:0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)$", process.stdout.readline().strip())
            assert found is not None, "it said where it listens"
            yield int(found[1])
        finally:
            process.terminate()


class Client:
    """A proposer that leads its own log, on a blocking socket."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        texts = "".join(f"{name}\0{value}\0" for name, value in PARAMETERS.items()) + "\0"
        packet = struct.pack("!I", 3 << 16) + texts.encode()
        self._socket.sendall(struct.pack("!I", len(packet) + 4) + packet)
        self._until(b"Z")
        query = b"START_WAL_PUSH (proto_version '3', allow_timeline_creation 'true')\0"
        self._socket.sendall(b"Q" + struct.pack("!I", len(query) + 4) + query)
        self._until(b"W")
        self.say(ProposerGreeting(TENANT, TIMELINE, MembershipConfig(), 170005, 7, SEGMENT_BYTES))
        self.hear()
        self.say(VoteRequest(0, 1))
        self.hear()
        self.say(ProposerElected(0, 1, START_LSN, (TermEntry(1, START_LSN),)))

    def say(self, message: ProposerMessage) -> None:
        """Send a message."""
        self._socket.sendall(packed(message))

    def hear(self) -> AcceptorMessage:
        """Return the next answer."""
        return codec_v3.decode_acceptor(self._until(b"d"))

    def _until(self, wanted: bytes) -> bytes:
        while True:
            kind, length = struct.unpack("!cI", self._file.read(5))
            body = self._file.read(length - 4)
            assert kind != b"E", body
            if kind == wanted:
                return body

    def append(self, begin_lsn: int, wal: bytes) -> float:
        """Return the seconds from the first byte sent to the end of the answer that reports it as
        durable."""
        end_lsn = begin_lsn + len(wal)
        request = packed(AppendRequest(0, 1, begin_lsn, end_lsn, 0, 0, wal))
        began = perf_counter()
        self._socket.sendall(request)
        body = self._until(b"d")
        seconds = perf_counter() - began
        answer = codec_v3.decode_acceptor(body)
        assert isinstance(answer, AppendResponse)
        assert answer.flush_lsn == end_lsn, (answer, end_lsn)
        return seconds


def packed(message: ProposerMessage) -> bytes:
    """Return a message as CopyData."""
    body = codec_v3.encode_proposer(message)
    return b"d" + struct.pack("!I", len(body) + 4) + body


def lone(report: Report, folder: Path, count: int) -> None:
    """Measure appends one after another."""
    log = MadeUpLog(START_LSN, magic=MAGIC)
    ends = [log.record(os.urandom(DATA_BYTES)) for _ in range(count)]
    number = os.open(folder / "peer", os.O_RDWR | os.O_CREAT)
    os.ftruncate(number, SEGMENT_BYTES)
    os.fsync(number)
    ours, peer = [], []
    with acceptor(folder / "wal", 1) as port:
        client = Client(port)
        begin = START_LSN
        for end in ends:
            wal = bytes(log.wal[begin - START_LSN : end - START_LSN])
            ours.append(client.append(begin, wal) * 1000)
            began = perf_counter()
            os.pwrite(number, wal, begin - START_LSN)
            os.fdatasync(number)
            peer.append((perf_counter() - began) * 1000)
            begin = end
    os.close(number)
    allowed = SHARE * median(peer) + MORE_MS
    report.add(Measure("wal_lone_append", median(ours), allowed, target=1))
    report.add(Measure("wal_lone_append_over_one_fdatasync", median(ours), median(peer)))


def main() -> None:
    """Run the benchmark."""
    report = Report(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        lone(report, Path(name), 100 if report.quick else 1000)
    report.close()


if __name__ == "__main__":
    main()

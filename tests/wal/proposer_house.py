"""Acceptors in this process, over real sockets and disks in memory: what a proposer needs of one.

A disk outlives the acceptor on it: `House.down` and `House.up` are a process's death and return.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from actors.runtime.errors import PenstockError
from actors.wal import codec_v3
from actors.wal.acceptor import AcceptorCore
from actors.wal.acceptor_stores import ControlState
from actors.wal.dialling import AcceptorAddress
from actors.wal.lsn import parse_lsn
from actors.wal.messages import WAL_BYTES_MAX

TENANT, TIMELINE = "0a" * 16, "0b" * 16
READY = b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I"
COPY_BOTH = b"W\0\0\0\x07\0\0\0"


class MemoryControl:
    def __init__(self) -> None:
        self.state = ControlState(TENANT, TIMELINE)

    def persist(self, state: ControlState) -> None:
        self.state = state


class MemoryWal:
    """Of a log whose every byte ends a record."""

    def __init__(self) -> None:
        self.start_lsn = 0
        self.wal = bytearray()
        self.must_truncate = True

    @property
    def write_lsn(self) -> int:
        return self.start_lsn + len(self.wal)

    write_record_lsn = flush_lsn = flush_record_lsn = write_lsn

    def initialize(self, start_lsn: int) -> None:
        assert not self.wal
        self.start_lsn = start_lsn

    def write(self, begin_lsn: int, wal: bytes) -> None:
        assert not self.must_truncate
        assert begin_lsn == self.write_lsn
        self.wal += wal

    def flush(self) -> None:
        pass

    def truncate(self, end_lsn: int) -> None:
        assert self.start_lsn <= end_lsn <= self.write_lsn
        del self.wal[end_lsn - self.start_lsn :]
        self.must_truncate = False

    def read(self, begin_lsn: int, size: int) -> bytes:
        at = begin_lsn - self.start_lsn
        assert at >= 0
        return bytes(self.wal[at : at + size])


class House:
    """One address: a disk, and an acceptor on it while it is up."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.control = MemoryControl()
        self.wal = MemoryWal()
        self.port = 0
        self.served: list[bytes] = []
        """The first word of every command."""
        self.rejects = ""
        """Why nobody is let in."""
        self.rejected = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> AcceptorAddress:
        return AcceptorAddress("127.0.0.1", self.port)

    async def up(self) -> None:
        self.wal.must_truncate = True
        self.acceptor = AcceptorCore(self.node_id, self.control, self.wal)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            (length,) = struct.unpack("!I", await reader.readexactly(4))
            startup = await reader.readexactly(length - 4)
            assert f"-c timeline_id={TIMELINE} tenant_id={TENANT}".encode() in startup
            assert b"database\0replication\0" in startup
            if self.rejects:
                self.rejected += 1
                text = b"C28P01\0M" + self.rejects.encode() + b"\0\0"
                writer.write(b"E" + struct.pack("!I", len(text) + 4) + text)
                return
            writer.write(READY)
            kind, body = await self._message(reader)
            assert kind == b"Q"
            words = body.rstrip(b"\0").decode().split()
            self.served.append(words[0].encode())
            writer.write(COPY_BOTH)
            if words[0] == "START_WAL_PUSH":
                assert body == (
                    b"START_WAL_PUSH (proto_version '3', allow_timeline_creation 'true')\0"
                )
                await self._push(reader, writer)
            else:
                term = int(words[3].split("'")[1]) if len(words) > 3 else None
                await self._replicate(writer, parse_lsn(words[2]), term)
        except (OSError, asyncio.IncompleteReadError):
            pass
        except PenstockError as error:
            text = b"M" + str(error).encode() + b"\0\0"
            writer.write(b"E" + struct.pack("!I", len(text) + 4) + text)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _message(self, reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        kind, length = struct.unpack("!cI", await reader.readexactly(5))
        return kind, await reader.readexactly(length - 4)

    async def _push(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        acceptor = self.acceptor
        while True:
            kind, body = await self._message(reader)
            assert kind == b"d"
            answer = acceptor.process(codec_v3.decode_proposer(body))
            acceptor.validate()
            if answer is not None:
                data = codec_v3.encode_acceptor(answer)
                writer.write(b"d" + struct.pack("!I", len(data) + 4) + data)
                await writer.drain()

    async def _replicate(
        self, writer: asyncio.StreamWriter, begin_lsn: int, term: int | None
    ) -> None:
        """Until the end, as a finite stream."""
        while True:
            if term is not None and self.acceptor.term != term:
                return
            end = self.wal.flush_lsn if term is not None else self.acceptor.commit_lsn
            wal = self.wal.read(begin_lsn, min(WAL_BYTES_MAX, end - begin_lsn))
            if not wal:
                return
            data = struct.pack("!cQQq", b"w", begin_lsn, end, 0) + wal
            writer.write(b"d" + struct.pack("!I", len(data) + 4) + data)
            await writer.drain()
            begin_lsn += len(wal)


@asynccontextmanager
async def houses(count: int = 3) -> AsyncIterator[list[House]]:
    """So many acceptors, up."""
    made = [House(number + 1) for number in range(count)]
    try:
        for house in made:
            await house.up()
        yield made
    finally:
        for house in made:
            await house.down()

"""A client of PostgreSQL's protocol that keeps every byte of an answer, for ``fuzz_rights.py``."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
from rights_model import ModelObject
from rights_statements import Effect, Step

from actors.model.pgwire.messages import encode_message
from actors.testing.patience import PATIENCE_S
from tests.kit.pg_fuzz import startup_packet


class LoginRefused(Exception):
    """The service did not let the user in."""


@dataclass
class PgAnswer:
    """All that came for one text."""

    raw: bytes = b""
    tags: list[str] = field(default_factory=list)
    code: str = ""
    """SQLSTATE of the error; empty if there is none."""
    error: str = ""
    status: str = ""
    """I, T or E: no transaction, an open one, a failed one."""


class PgSession:
    """One connection of a role, with what the fuzzer knows of its state."""

    def __init__(self, role: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.role = role
        self._reader = reader
        self._writer = writer
        self.status = "I"
        self.pending: list[tuple[Step, Effect | None]] = []
        """Changes of the open transaction."""
        self.mark: int | None = None
        """How many there were at the savepoint."""
        self.held: dict[str, tuple[set[str], list[ModelObject]]] = {}
        """What a cursor may show: canaries that were visible when it was declared, and objects."""
        self.odd = False
        """True after a setting with which right reads may fail."""

    @classmethod
    async def connect(cls, address: str, role: str, password: str) -> Self:
        """Log in. Raises `LoginRefused`."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        made = cls(role, reader, writer)
        writer.write(startup_packet(user=role, database="penstock"))
        try:
            await made._prove(password)
        except BaseException:
            writer.close()
            raise
        return made

    async def _prove(self, password: str) -> None:
        bare, signed, client_key = "n=,r=abcdef", b"", b""
        while True:
            kind, body = await self._message()
            if kind == b"E":
                raise LoginRefused(_error(body)[1])
            if kind == b"Z":
                return
            if kind != b"R":
                continue
            code = int.from_bytes(body[:4], "big")
            if code == 10:
                first = f"n,,{bare}".encode()
                text = b"SCRAM-SHA-256\0" + struct.pack("!I", len(first)) + first
                self._writer.write(encode_message(b"p", text))
            elif code == 11:
                challenge = body[4:].decode()
                found = dict(part.split("=", 1) for part in challenge.split(","))
                salt, rounds = base64.b64decode(found["s"]), int(found["i"])
                salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, rounds)
                client_key = hmac.digest(salted, b"Client Key", "sha256")
                unproved = f"c=biws,r={found['r']}"
                signed = f"{bare},{challenge},{unproved}".encode()
                stored = hashlib.sha256(client_key).digest()
                signature = hmac.digest(stored, signed, "sha256")
                proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
                final = f"{unproved},p={base64.b64encode(proof).decode()}"
                self._writer.write(encode_message(b"p", final.encode()))

    async def send(self, step: Step) -> PgAnswer:
        """Send a step and return what comes of it."""
        self._writer.write(_messages(step))
        found = PgAnswer()
        parts: list[bytes] = []
        async with asyncio.timeout(PATIENCE_S):
            while True:
                kind, body = await self._message()
                parts.append(body)
                match kind:
                    case b"Z":
                        found.status = self.status = body.decode()
                        found.raw = b"\0".join(parts)
                        return found
                    case b"E":
                        found.code, found.error = _error(body)
                    case b"C":
                        found.tags.append(body[:-1].decode())
                    case b"G" if step.copied is not None:
                        copied = encode_message(b"d", step.copied) + encode_message(b"c")
                        self._writer.write(copied + _sync(step))
                    case b"G":
                        self._writer.write(encode_message(b"f", b"no\0") + _sync(step))

    async def _message(self) -> tuple[bytes, bytes]:
        head = await self._reader.readexactly(5)
        length = int.from_bytes(head[1:], "big")
        return head[:1], await self._reader.readexactly(length - 4)

    async def aclose(self) -> None:
        """End the connection."""
        self._writer.close()


def _messages(step: Step) -> bytes:
    """The messages that send a step."""
    if not step.prepared:
        return encode_message(b"Q", step.text.encode() + b"\0")
    name = step.prepared.strip("-").encode()
    sent = b""
    if step.text:
        sent += encode_message(b"C", b"S" + name + b"\0") if name else b""
        sent += encode_message(b"P", name + b"\0" + step.text.encode() + b"\0\0\0")
    sent += encode_message(b"D", b"S" + name + b"\0")
    sent += encode_message(b"B", b"\0" + name + b"\0\0\0\0\0\0\0")
    sent += encode_message(b"D", b"P\0") + encode_message(b"E", b"\0\0\0\0\0")
    return sent + encode_message(b"S")


def _sync(step: Step) -> bytes:
    # The one before was swallowed by the COPY.
    return encode_message(b"S") if step.prepared else b""


def _error(body: bytes) -> tuple[str, str]:
    fields = {part[:1]: part[1:].decode() for part in body.split(b"\0") if part}
    return fields.get(b"C", ""), fields.get(b"M", "")

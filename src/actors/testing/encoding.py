"""Encodes and decodes messages on their way, so that sender and receiver share no objects.

Theory of operation. `EncodedMailbox` replaces `BoundedMailbox` (`ActorSystem.mailbox_type`). Each
message sent through it is written to bytes and read back: structs field by field, Arrow tables as
IPC streams, errors by type, arguments and attributes. So any test in this mode finds a receiver
that changes a message, or that relies on the identity of an object that another actor holds. The
results of an actor's own effects are left alone: they come from no other actor.

A few things cannot be encoded and pass by reference (`BY_REFERENCE`): ways to speak to an actor
(`ActorAddress`, `ReplySlot`), types and functions, and handles of something that lives in one
place, such as a reader of a shard or a child process. Anything else that is not data fails with
`NotEncodable`, which names it. A project adds its own handles with `carry_by_reference`.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import io
import pathlib
import pickle
import uuid
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa

from actors.control.access.open_sessions import OpenSession
from actors.control.controller.replicas.replica import ReplicaLink
from actors.control.controller.sessions.memory_link import MemoryConnection
from actors.engine.spark.launch import EngineProcess
from actors.model.plan.updates import from_ipc, to_ipc
from actors.replica.cluster.connection import LocalInbox
from actors.replica.cluster.serving import WireSink
from actors.runtime.kernel import (
    Actor,
    ActorAddress,
    ActorContext,
    ActorSystem,
    BoundedMailbox,
    ReplySlot,
    RunningEffect,
)
from actors.runtime.transport.connection import FramedConnection

M = TypeVar("M")

BY_REFERENCE: Final[list[type[Any]]] = [
    ActorAddress,
    OpenSession,
    ReplySlot,
    Actor,
    ActorContext,
    RunningEffect,
    ActorSystem,
    EngineProcess,
    FramedConnection,
    MemoryConnection,
    LocalInbox,
    ReplicaLink,
    WireSink,
]
"""Types that pass by reference, subclasses included. Types, functions and other callables do,
too."""


DATA: Final[tuple[type[Any], ...]] = (
    msgspec.Struct,
    enum.Enum,
    pathlib.PurePath,
    decimal.Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    pa.Schema,
    pa.DataType,
    pa.Field,
)
"""Types that are encoded, in addition to plain values and containers, Arrow tables and errors."""


class NotEncodable(TypeError):
    """Raised for a message that holds something that is neither data nor a declared handle."""


def carry_by_reference(*kinds: type[Any]) -> None:
    """Declare types of handles, which pass by reference."""
    BY_REFERENCE.extend(kind for kind in kinds if kind not in BY_REFERENCE)


class _Encoder(pickle.Pickler):
    """Encodes to bytes, and collects the objects that are carried alongside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.carried: list[Any] = []
        """Objects that pass by reference, in the order of their numbers."""

    def persistent_id(self, value: Any) -> int | None:
        """Return a number for an object that passes by reference, else None."""
        if not callable(value) and not isinstance(value, tuple(BY_REFERENCE)):
            return None
        self.carried.append(value)
        return len(self.carried) - 1

    def reducer_override(self, value: Any) -> Any:
        """Reduce Arrow data to IPC streams, and errors to type, arguments and attributes (without
        causes and frames)."""
        if isinstance(value, pa.Table):
            return from_ipc, (to_ipc(value),)
        if isinstance(value, BaseException):
            return _error, (type(value), value.args, dict(value.__dict__))
        if isinstance(value, DATA):
            return NotImplemented
        raise NotEncodable(f"{type(value).__qualname__} is not data")


class _Decoder(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, carried: list[Any]) -> None:
        super().__init__(file)
        self._carried = carried

    def persistent_load(self, number: Any) -> Any:
        """Return the carried object with that number."""
        return self._carried[number]


def _error(kind: type[BaseException], args: tuple[Any, ...], rest: dict[str, Any]) -> BaseException:
    made = kind.__new__(kind, *args)
    made.args = args
    made.__dict__.update(rest)
    return made


def encode_and_decode(message: M) -> M:
    """Return the message after writing it to bytes and reading it back. Raises `NotEncodable`."""
    file = io.BytesIO()
    encoder = _Encoder(file)
    try:
        encoder.dump(message)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise NotEncodable(
            f"{type(message).__name__} holds what is neither data nor a handle: {error}; "
            f"declare handles with carry_by_reference. The message: {str(message)[:500]}"
        ) from error
    file.seek(0)
    copy: M = _Decoder(file, encoder.carried).load()
    return copy


def encode_all(on: bool) -> None:
    """Encode all messages between actors of this process, including answers to asks."""
    ActorSystem.mailbox_type = EncodedMailbox if on else BoundedMailbox
    ReplySlot.set = _set_encoded if on else _set  # type: ignore[assignment,method-assign]


_set: Final = ReplySlot.set


def _set_encoded(reply: ReplySlot[Any], value: Any) -> None:
    _set(reply, encode_and_decode(value))


class EncodedMailbox(BoundedMailbox[M]):
    """A mailbox whose messages share no objects with their sender."""

    __slots__ = ()

    deliver_own = BoundedMailbox.deliver

    async def send(self, message: M) -> None:
        """Send a copy as `BoundedMailbox.send` does."""
        await super().send(encode_and_decode(message))

    def send_nowait(self, message: M) -> None:
        """Send a copy as `BoundedMailbox.send_nowait` does."""
        super().send_nowait(encode_and_decode(message))

    def deliver(self, message: M) -> bool:
        """Deliver a copy as `BoundedMailbox.deliver` does."""
        return super().deliver(encode_and_decode(message))

"""Bytes of strangers, for the parsers of the WAL: accepted, or exactly one named error.

Pure. A `target` hands bytes to one parser and answers with the error or None; it raises for
anything else, which is a bug, as is a message that was understood and cannot be said again, or is
understood in another way then. The suite and the campaign of ``tests/proof/fuzz_wal.py`` share it.

A parser of another part joins by a line in `TARGETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final, TypeAlias

from actors.errors import MalformedFrame, PenstockError
from actors.testing.wire_fuzz import mutated
from actors.wal import codec_v2, codec_v3
from actors.wal.feedback import decode_feedback, encode_feedback

Target: TypeAlias = Callable[[bytes], PenstockError | None]


def message_of(decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Target:
    """Reads one message."""

    def read(data: bytes) -> PenstockError | None:
        try:
            message = decode(data)
        except MalformedFrame as error:
            return error
        said = encode(message)
        assert decode(said) == message, (data.hex(), said.hex())
        assert encode(decode(said)) == said, (data.hex(), said.hex())
        return None

    return read


TARGETS: Final[dict[str, Target]] = {
    "v3 proposer": message_of(codec_v3.decode_proposer, codec_v3.encode_proposer),
    "v3 acceptor": message_of(codec_v3.decode_acceptor, codec_v3.encode_acceptor),
    "v2 proposer": message_of(codec_v2.decode_proposer, codec_v2.encode_proposer),
    "v2 acceptor": message_of(codec_v2.decode_acceptor, codec_v2.encode_acceptor),
    "feedback": message_of(decode_feedback, encode_feedback),
}


def mutated_wal(data: bytes, others: list[bytes], rng: Random) -> bytes:
    """The bytes, changed a few times as one would who knows the formats.

    Numbers of either byte order: reversed bytes have theirs the other way round."""
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            data = mutated(data, others, rng)
        else:
            data = mutated(data[::-1], others, rng)[::-1]
    return data

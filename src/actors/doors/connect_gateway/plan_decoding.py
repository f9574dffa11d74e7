"""Decodes clients' requests, which may be deeply nested and compressed, within limits."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError
from pyspark.sql.connect.proto import base_pb2

from actors.doors.connect_gateway.error_status import SparkCondition
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage, walk_messages
from actors.engine.spark.spark_releases import is_given

NESTING_MAX: Final = 1024
"""Maximum nesting of messages, as in Spark's own server."""
FIELDS_MAX: Final = 100_000
"""Maximum fields of a deeply nested message, because counting them blocks the event loop."""
_LENGTH_DELIMITED: Final = 2
_FIXED: Final = {1: 8, 5: 4}
"""Sizes of the wire types with fixed size."""
_MESSAGE_TYPE: Final = 11
"""`FieldDescriptor.TYPE_MESSAGE`."""


def decode_request(kind: Any, data: bytes, bytes_max: int) -> ProtoMessage:
    """Decode a request, including its compressed plans. Raises `SparkCondition`."""
    request = _decoded(kind, data)
    for plan in [
        found
        for found in walk_messages(request)
        if found.DESCRIPTOR.full_name == "spark.connect.Plan"
        and is_given(found, "compressed_operation")
    ]:
        _decompress(plan, bytes_max)
    return request


def _decoded(kind: Any, data: bytes) -> ProtoMessage:
    try:
        return kind.FromString(data)
    except DecodeError:
        # The bytes are invalid, or nested more deeply than the decoder's default limit.
        if not _is_nested_within(kind.DESCRIPTOR, data, NESTING_MAX):
            raise _malformed("not a Spark Connect message, or nested too deeply") from None
    return _decoded_deep(kind, data)


def _decoded_deep(kind: Any, data: bytes) -> ProtoMessage:
    """Decode a deeply nested message, whose depth was checked to fit the decoder's stack."""
    try:
        from google._upb import _message
    except ImportError:
        raise _malformed("nested too deeply for this build of protobuf") from None
    # This switch affects the entire process, so it is on only during this synchronous call.
    _message.SetAllowOversizeProtos(True)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise _malformed("not a Spark Connect message") from None
    finally:
        _message.SetAllowOversizeProtos(False)


def _is_nested_within(descriptor: Any, data: bytes, depth_max: int) -> bool:
    """Return whether the bytes of a message are well-formed, with at most `FIELDS_MAX` fields and a
    nesting of at most `depth_max`."""
    count = 0
    # An explicit stack, since recursion could overflow. The bytes are not copied.
    left = [(descriptor, 0, len(data), 1)]
    while left:
        kind, at, end, depth = left.pop()
        if depth > depth_max:
            return False
        while at < end:
            read = _field(data, at, end)
            count += 1
            if read is None or count > FIELDS_MAX:
                return False
            number, wire, start, at = read
            field = kind.fields_by_number.get(number)
            # The decoder skips unknown fields, so do not descend into them.
            if wire == _LENGTH_DELIMITED and field is not None and field.type == _MESSAGE_TYPE:
                left.append((field.message_type, start, at, depth + 1))
    return True


def _field(data: bytes, at: int, end: int) -> tuple[int, int, int, int] | None:
    """Return (number, wire type, start and end of the value) of a field; None if malformed."""
    found = _varint(data, at, end)
    if found is None:
        return None
    tag, start = found
    if not tag >> 3:
        return None  # field number 0 is invalid
    wire = tag & 7
    if wire == 0:
        value = _varint(data, start, end)
        return None if value is None else (tag >> 3, wire, start, value[1])
    if wire == _LENGTH_DELIMITED:
        length = _varint(data, start, end)
        if length is None or length[1] + length[0] > end:
            return None
        return tag >> 3, wire, length[1], length[1] + length[0]
    size = _FIXED.get(wire)
    if size is None or start + size > end:
        return None
    return tag >> 3, wire, start, start + size


def _varint(data: bytes, at: int, end: int) -> tuple[int, int] | None:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            return None
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return None


def _decompress(plan: ProtoMessage, bytes_max: int) -> None:
    """Decompress a plan in place, to at most `bytes_max` bytes."""
    packed = plan.compressed_operation
    if packed.compression_codec != base_pb2.COMPRESSION_CODEC_ZSTD:
        raise _malformed("unknown compression")
    try:
        import zstandard
    except ImportError:
        raise _malformed("it is compressed, but zstandard is not installed") from None
    try:
        # Read with a limit, since the size that a frame claims cannot be trusted.
        with zstandard.ZstdDecompressor().stream_reader(packed.data) as reader:
            data = reader.read(bytes_max + 1)
    except zstandard.ZstdError as error:
        raise _malformed(f"decompression failed: {error}") from None
    if len(data) > bytes_max:
        raise _malformed(f"it exceeds {bytes_max} bytes (connect_message_bytes_max)")
    kinds = base_pb2.Plan.CompressedOperation
    if packed.op_type == kinds.OP_TYPE_RELATION:
        plan.root.CopyFrom(_decoded(type(plan.root), data))
    elif packed.op_type == kinds.OP_TYPE_COMMAND:
        plan.command.CopyFrom(_decoded(type(plan.command), data))
    else:
        raise _malformed("neither a relation nor a command")


def _malformed(text: str) -> SparkCondition:
    return SparkCondition(
        "CONNECT_INVALID_PLAN.CANNOT_PARSE",
        "56K00",
        f"The Spark Connect plan is invalid. Cannot decompress or parse the input plan: {text}",
        "org.apache.spark.sql.connect.common.InvalidPlanInput",
    )

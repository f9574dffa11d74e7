"""Inspects requests and responses that the gateway forwards to and from Spark. Pure."""

from __future__ import annotations

from typing import Final

from pyspark.sql.connect.proto import base_pb2

from actors.doors.connect_gateway.plan_rewriting import ProtoMessage

_SMALL_BYTES: Final = 4096
"""Upper bound for the size of responses without rows, such as the last one of an operation."""


def observed_session(request: ProtoMessage) -> str:
    """Return Spark's id of the session that the client has seen in earlier answers; "" if none."""
    return str(getattr(request, "client_observed_server_side_session_id", ""))


def with_original(data: bytes, original: ProtoMessage | None) -> tuple[bytes, bool]:
    """Put the client's own relation into a response of Spark. Return the response, and whether it
    is the operation's last."""
    if original is None and len(data) > _SMALL_BYTES:
        return data, False
    answer = base_pb2.ExecutePlanResponse.FromString(data)
    if original is not None and answer.HasField("sql_command_result"):
        relation = answer.sql_command_result.relation
        # For a query, Spark returns the relation that it was sent. For a command, the relation
        # holds the rows and is kept.
        if relation.WhichOneof("rel_type") in ("sql", "with_relations"):
            relation.CopyFrom(original)
            data = answer.SerializeToString()
    return data, answer.HasField("result_complete")


def is_interrupted(request: ProtoMessage, operation_id: str, tags: frozenset[str]) -> bool:
    """Return whether an `InterruptRequest` applies to an operation with this id and these tags."""
    kinds = base_pb2.InterruptRequest
    match request.interrupt_type:
        case kinds.INTERRUPT_TYPE_ALL:
            return True
        case kinds.INTERRUPT_TYPE_TAG:
            return request.operation_tag in tags
        case kinds.INTERRUPT_TYPE_OPERATION_ID:
            return bool(request.operation_id == operation_id)
    return False

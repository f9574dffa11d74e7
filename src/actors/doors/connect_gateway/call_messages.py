"""Reads what the gateway must know of requests and responses that are Spark's. Pure."""

from __future__ import annotations

from typing import Final

from pyspark.sql.connect.proto import base_pb2

from actors.doors.connect_gateway.plan_rewriting import ProtoMessage

_SMALL_BYTES: Final = 4096
"""The last response of an operation, and others without rows, are smaller."""


def observed_session(request: ProtoMessage) -> str:
    """Return Spark's id of the session that a client has seen in answers; empty for none."""
    return str(getattr(request, "client_observed_server_side_session_id", ""))


def with_original(data: bytes, original: ProtoMessage | None) -> tuple[bytes, bool]:
    """Return a response of Spark, with the client's own relation in it, and whether it is the last
    one."""
    if original is None and len(data) > _SMALL_BYTES:
        return data, False
    answer = base_pb2.ExecutePlanResponse.FromString(data)
    if original is not None and answer.HasField("sql_command_result"):
        relation = answer.sql_command_result.relation
        # A command's rows come as a relation of their own; a query's is the one that was sent.
        if relation.WhichOneof("rel_type") in ("sql", "with_relations"):
            relation.CopyFrom(original)
            data = answer.SerializeToString()
    return data, answer.HasField("result_complete")


def is_interrupted(request: ProtoMessage, operation_id: str, tags: frozenset[str]) -> bool:
    """Return whether an interrupt is for an operation."""
    kinds = base_pb2.InterruptRequest
    match request.interrupt_type:
        case kinds.INTERRUPT_TYPE_ALL:
            return True
        case kinds.INTERRUPT_TYPE_TAG:
            return request.operation_tag in tags
        case kinds.INTERRUPT_TYPE_OPERATION_ID:
            return bool(request.operation_id == operation_id)
    return False

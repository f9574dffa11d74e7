"""Rewrites streams of an object's changes in plans: `readStream.table`, `readStream.changes`. Pure.

Spark reads the changes itself, with the data source `penstock` (docs/guides/spark-source.md), which
reads the service's stores as a guest. So a stream stores its position in Spark's checkpoint, and
can be resumed from there in any session.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark.sql.connect.proto import base_pb2, relations_pb2

from actors.doors.connect_gateway.error_status import unsupported
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage, walk_messages
from actors.doors.connect_gateway.sql_names import ResolveName, parse_identifier
from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import Settings

SOURCE: Final = "penstock"
"""Name of the data source."""
_SOURCE_CLASS: Final = b"cactors.engine.spark.source.data_source\nPenstockDataSource\n."
"""Pickle of the class, by module and name. It is imported only where Spark uses it."""
_OPTIONS: Final = ("startingTime", "consumer", "maxRowsPerBatch")
"""Options that a client may set. The service sets those that locate its stores."""


def registration() -> ProtoMessage:
    """Return the plan that registers the data source in a session."""
    plan = base_pb2.Plan()
    made = plan.command.register_data_source
    made.name = SOURCE
    made.python_data_source.command = _SOURCE_CLASS
    made.python_data_source.python_ver = f"{sys.version_info.major}.{sys.version_info.minor}"
    return plan


def bind_streams(
    message: ProtoMessage, resolve: ResolveName, settings: Settings
) -> tuple[ProtoMessage, frozenset[str]]:
    """Replace streams of objects in a plan by streams of the data source.

    Return the new plan and the names of the objects; the plan itself if it has no such streams.
    Raises `SparkCondition` if Spark cannot reach the stores, and `InvalidUsage`.
    """
    if not any(_stream_of(each, resolve) for each in walk_messages(message)):
        return message, frozenset()
    _check_reach(settings)
    bound = type(message)()
    bound.CopyFrom(message)
    keys: set[str] = set()
    for each in list(walk_messages(bound)):
        key = _stream_of(each, resolve)
        if key is not None:
            keys.add(key)
            _replace(each, key, settings)
    return bound, frozenset(keys)


def _stream_of(relation: ProtoMessage, resolve: ResolveName) -> str | None:
    """Return the object whose changes a relation streams; None for any other relation."""
    if relation.DESCRIPTOR.full_name != relations_pb2.Relation.DESCRIPTOR.full_name:
        return None
    kind = relation.WhichOneof("rel_type")
    if kind == "read" and relation.read.is_streaming and relation.read.HasField("named_table"):
        text = relation.read.named_table.unparsed_identifier
    elif kind == "relation_changes" and relation.relation_changes.is_streaming:
        text = relation.relation_changes.unparsed_identifier
    else:
        return None
    parts = parse_identifier(text)
    return None if parts is None else resolve(parts)


def _replace(relation: ProtoMessage, key: str, settings: Settings) -> None:
    if relation.WhichOneof("rel_type") == "read":
        given = dict(relation.read.named_table.options)
    else:
        given = dict(relation.relation_changes.options)
    kept = relations_pb2.RelationCommon()
    kept.CopyFrom(relation.common)
    relation.Clear()
    relation.common.CopyFrom(kept)
    # Keep the object's name as an alias, because columns may be qualified with it.
    relation.subquery_alias.alias = key
    read = relation.subquery_alias.input.read
    read.is_streaming = True
    read.data_source.format = SOURCE
    read.data_source.options.update(_options(given))
    read.data_source.options.update(
        {"stateDir": str(Path(settings.state_dir).absolute()), "object": key, "changes": "true"}
    )


def _options(given: Mapping[str, str]) -> dict[str, str]:
    """Return a client's options in their canonical spelling. Raises `InvalidUsage` for an option
    that clients cannot set."""
    known = {name.lower(): name for name in _OPTIONS}
    for name in given:
        if name.lower() not in known:
            raise InvalidUsage(
                f"unknown option {name!r} for a stream of a Penstock object: expected one of "
                f"{', '.join(_OPTIONS)}"
            )
    return {known[name.lower()]: value for name, value in given.items()}


def _check_reach(settings: Settings) -> None:
    if settings.blob_url or settings.consensus_url or not settings.spark_master.startswith("local"):
        # The client can see addresses in a plan, which may contain passwords.
        raise unsupported(
            "Streams of changes of Penstock objects require that Penstock keeps its stores in its "
            "state directory and that its Spark is local. Subscribe with Penstock's own client."
        )
    if settings.reader_lease_ms != Settings().reader_lease_ms:
        # The data source uses the default, so the service could drop its lease too early.
        raise unsupported(
            "Streams of changes of Penstock objects require the default value of reader_lease_ms."
        )

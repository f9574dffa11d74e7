"""All kinds of sinks: their configuration classes and factories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

import msgspec

from actors.connectors.sinks.delta import DeltaConfig, DeltaSink
from actors.connectors.sinks.parquet import ParquetConfig, ParquetSink
from actors.connectors.sinks.sink import SinkConnector
from actors.connectors.sinks.sink_storage import open_storage
from actors.connectors.sources.source import choices_hint
from actors.durable.object_store.bucket_paths import is_bucket
from actors.runtime.errors import InvalidUsage, nearest_hint
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings

SinkConfig: TypeAlias = DeltaConfig | ParquetConfig
KINDS: Final[Mapping[str, type[SinkConfig]]] = {"delta": DeltaConfig, "parquet": ParquetConfig}
OURS: Final = ("creation",)
"""Fields that a user may not set."""


def encode(config: SinkConfig) -> bytes:
    """Return a configuration as msgpack. It contains no secrets."""
    return msgspec.msgpack.encode(config)


def decode(data: bytes) -> SinkConfig:
    """Parse what `encode` returned. Raises `InvalidUsage`."""
    try:
        config: SinkConfig = msgspec.msgpack.decode(data, type=SinkConfig)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidUsage(f"invalid configuration of a sink: {error}") from None
    return config


def config_of(kind: str, options: Mapping[str, Any], creation: str) -> SinkConfig:
    """Return the configuration of a new sink from a user's options; text values are converted.

    `creation` distinguishes it from any other sink with the same id. Raises `InvalidUsage`.
    """
    if kind not in KINDS:
        raise InvalidUsage(f"unknown kind of sink {kind!r} (available: {', '.join(KINDS)})")
    fields = [field for field in msgspec.structs.fields(KINDS[kind]) if field.name not in OURS]
    names = [field.name for field in fields]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise InvalidUsage(
            f"a sink of kind {kind} has no option {unknown[0]!r} (available: "
            f"{', '.join(names)}){nearest_hint(unknown[0], names)}"
        )
    try:
        config: SinkConfig = msgspec.convert(
            {**options, "kind": kind, "creation": creation}, SinkConfig, strict=False
        )
    except msgspec.ValidationError as error:
        hint = choices_hint(KINDS[kind], str(error))
        raise InvalidUsage(f"invalid options of a sink of kind {kind}: {error}{hint}") from None
    if isinstance(config, DeltaConfig) and config.retain_hours < 1:
        raise InvalidUsage(f"invalid retain_hours {config.retain_hours}: expected at least 1")
    return config


def make_sink(
    config: SinkConfig,
    sink: ObjectId,
    settings: Settings,
    clock: ActorClock,
    randomness: Random,
    scratch: Path,
) -> SinkConnector:
    """Return a sink that is not open yet.

    `scratch` is a folder for files to be uploaded, created and removed by the sink. Resolves links
    in the file system. Raises `InvalidUsage` for a folder or bucket that is not allowed.
    """
    token = f"{randomness.getrandbits(64):016x}"
    if not is_bucket(config.folder) and not settings.sink_dir:
        raise InvalidUsage(
            f"cannot write to {config.folder!r}: sinks may not write to folders, because the "
            "setting sink_dir is empty"
        )
    spool, buckets = scratch / f"going-{token}", settings.sink_buckets
    storage = open_storage(config.folder, "sink", settings.sink_dir, buckets, spool, settings)
    if isinstance(config, DeltaConfig):
        return DeltaSink(config, storage, sink, token, settings, clock)
    return ParquetSink(config, storage, sink, token, settings, clock)

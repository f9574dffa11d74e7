"""All kinds of sources: their configurations, and what makes a source from each.

A new kind has its configuration (a `SourceConfig` with a tag) and its class in a file of its own,
and is added to `_MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, Union

import msgspec

from actors.connectors.sources.churn import ChurnConfig, ChurnSeries
from actors.connectors.sources.counter import CounterConfig, CounterSeries
from actors.connectors.sources.files import FilesConfig, FilesSource
from actors.connectors.sources.generators import GeneratorSource
from actors.connectors.sources.nexmark import NexmarkConfig, NexmarkSeries
from actors.connectors.sources.postgres_config import PostgresConfig
from actors.connectors.sources.source import ConnectorContext, SourceConfig, SourceConnector
from actors.connectors.sources.tpch import TpchConfig, TpchSeries
from actors.connectors.sources.wal import WalSource
from actors.connectors.sources.wal_config import WalConfig
from actors.errors import InvalidUsage, nearest_hint
from actors.settings import Settings

# -- Checks which secrets of the service a source may use ------------------------------------------
# Whoever creates a source chooses the server to which a password is sent. So a source may not name
# any variable or file of the service, only those that were put there for sources.


_VARIABLES: Final = ("password_env", "token_env")
_FILES: Final = ("password_file", "passfile", "sslkey", "sslcert", "sslrootcert", "token_file")


def check_secrets(config: PostgresConfig | WalConfig, settings: Settings) -> None:
    """Raise `InvalidUsage` for a variable or a file that is not for sources."""
    prefix = settings.secret_env_prefix
    for name in _VARIABLES:
        variable = getattr(config, name, "")
        if variable and not variable.startswith(prefix):
            raise InvalidUsage(
                f"{name} {variable!r}: the name must begin with {prefix} (secret_env_prefix)"
            )
    for name in _FILES:
        path = getattr(config, name, "")
        # libpq takes ``system`` for the authorities that the system trusts.
        if path and path != "system":
            _check_file(name, path, settings.secret_dir)


def _check_file(name: str, path: str, allowed: str) -> None:
    if not allowed:
        raise InvalidUsage(
            f"{name} {path!r}: sources may use no files, as long as the setting secret_dir names "
            "no folder with theirs"
        )
    # Links resolved: one below the folder must not lead out of it.
    root = Path(allowed).resolve()
    if not Path(path).is_absolute() or root not in Path(path).resolve().parents:
        raise InvalidUsage(f"{name} {path!r}: must lie below {root} (secret_dir)")


def _postgres(config: PostgresConfig, around: ConnectorContext) -> SourceConnector:
    try:
        # Imported here: psycopg is an optional dependency.
        from actors.connectors.sources.postgres import PostgresSource
    except ImportError as error:
        raise InvalidUsage(
            f"a source of kind postgres needs psycopg ({error}): "
            "pip install 'penstock-views[postgres]'"
        ) from None
    check_secrets(config, around.settings)
    return PostgresSource(config, around.id, around.clock)


_Maker: TypeAlias = Callable[[Any, ConnectorContext], SourceConnector]


def _tpch(config: TpchConfig, around: ConnectorContext) -> SourceConnector:
    series = TpchSeries(config, around.clock, around.scratch)
    return GeneratorSource(series, config, around.clock)


def _wal(config: WalConfig, around: ConnectorContext) -> SourceConnector:
    check_secrets(config, around.settings)
    return WalSource(config, around)


_MAKERS: Final[Mapping[type[SourceConfig], _Maker]] = {
    CounterConfig: lambda config, around: GeneratorSource(
        CounterSeries(config), config, around.clock
    ),
    ChurnConfig: lambda config, around: GeneratorSource(ChurnSeries(config), config, around.clock),
    NexmarkConfig: lambda config, around: GeneratorSource(
        NexmarkSeries(config), config, around.clock
    ),
    TpchConfig: _tpch,
    FilesConfig: FilesSource,
    PostgresConfig: _postgres,
    WalConfig: _wal,
}
"""All kinds, and nowhere else: the configuration's class, and what makes its source."""
KINDS: Final = tuple(str(kind.__struct_config__.tag) for kind in _MAKERS)
# For the parser, which chooses the class by the tag.
_ANY_CONFIG: Final[Any] = Union[tuple(_MAKERS)]  # noqa: UP007 - the members are computed


def make_source(config: SourceConfig, around: ConnectorContext) -> SourceConnector:
    """Return a source that is not opened yet. Raises `InvalidUsage` when an option is out of range,
    or a package that the kind needs is not installed."""
    config.check()
    return _MAKERS[type(config)](config, around)


def kind_of(config: SourceConfig) -> str:
    """Return the name of a configuration's kind."""
    return str(config.__struct_config__.tag)


def encode(config: SourceConfig) -> bytes:
    """Return a configuration as JSON, for the catalog."""
    return msgspec.json.encode(config)


def decode(data: bytes | str) -> SourceConfig:
    """Parse a configuration that `encode` or a user wrote. Raises `InvalidUsage` naming the field
    that does not fit."""
    try:
        found: SourceConfig = msgspec.json.decode(data, type=_ANY_CONFIG)
    except msgspec.DecodeError as error:
        raise InvalidUsage(f"not the configuration of a source: {error}{_choice(data)}") from None
    return found


def check_names(config: bytes, kind: str) -> None:
    """Raise `InvalidUsage` for an option that a kind of source does not have, with the nearest one
    that it has."""
    # Also of a kind whose stored configurations may have more: those are of other releases.
    try:
        given = msgspec.json.decode(config, type=dict[str, Any])
    except msgspec.DecodeError:
        return  # `decode` says what is wrong
    (made,) = (each for each in _MAKERS if each.__struct_config__.tag == kind)
    names = [each.name for each in msgspec.structs.fields(made) if each.name != "token"]
    for name in given:
        if name not in ("type", *names):
            raise InvalidUsage(
                f"a source of kind {kind} has no option {name!r}: it has {', '.join(names)}"
                f"{nearest_hint(name, names)}"
            )


def _choice(data: bytes | str) -> str:
    """Return a hint with the known options or kinds; "" if the names are right."""
    try:
        given = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        return ""
    for kind in _MAKERS:
        if given.get("type") == kind.__struct_config__.tag:
            names = [field.name for field in msgspec.structs.fields(kind) if field.name != "token"]
            return "" if set(given) <= {"type", *names} else f"; it has {', '.join(names)}"
    return f"; kinds are {', '.join(KINDS)}"

"""All kinds of sources: their configuration classes and factories.

To add a kind, write its configuration (a tagged `SourceConfig`) and its source class in a file of
their own, and add them to `_MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, Union

import msgspec

from actors.connectors.sources.churn import ChurnConfig, ChurnSeries
from actors.connectors.sources.counter import CounterConfig, CounterSeries
from actors.connectors.sources.files import FilesConfig, FilesSource
from actors.connectors.sources.generators import GeneratorSource
from actors.connectors.sources.nexmark import NexmarkConfig, NexmarkSeries
from actors.connectors.sources.postgres_config import PostgresConfig
from actors.connectors.sources.source import (
    ConnectorContext,
    SourceConfig,
    SourceConnector,
    check_configuration,
    choices_hint,
)
from actors.connectors.sources.source_secrets import SecretUser, check_secrets
from actors.connectors.sources.tpch import TpchConfig, TpchSeries
from actors.connectors.sources.wal import WalSource
from actors.connectors.sources.wal_config import WalConfig
from actors.runtime.errors import InvalidUsage, nearest_hint
from actors.runtime.settings import Settings


def _postgres(config: PostgresConfig, around: ConnectorContext) -> SourceConnector:
    try:
        # Imported here: psycopg is an optional dependency.
        from actors.connectors.sources.postgres import PostgresSource
    except ImportError as error:
        raise InvalidUsage(
            f"a source of kind postgres needs psycopg ({error}): pip install "
            "'penstock-views[postgres]'"
        ) from None
    check_secrets(config, around.settings)
    return PostgresSource(
        config,
        around.id,
        around.clock,
        weak_passwords=around.settings.source_weak_passwords,
    )


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
"""Maps each configuration class to the function that makes its source. The only list of kinds."""
OURS: Final = ("token",)
"""Fields that a user may not set."""
KINDS: Final = tuple(str(kind.__struct_config__.tag) for kind in _MAKERS)
# The JSON parser picks the class by its tag.
_ANY_CONFIG: Final[Any] = Union[tuple(_MAKERS)]  # noqa: UP007 - the members are computed


def make_source(config: SourceConfig, around: ConnectorContext) -> SourceConnector:
    """Return a source that is not open yet.

    Raises `InvalidUsage` if an option is out of range or a package that the kind needs is missing.
    """
    config.check()
    return _MAKERS[type(config)](config, around)


def check_new(config: SourceConfig, settings: Settings) -> None:
    """Raise `AccessDenied` for a source that only an administrator may create: one that sends a
    secret to a host that is not listed for that secret. Reads the lists of hosts."""
    if isinstance(config, SecretUser):
        check_secrets(config, settings, listed_only=True)


def kind_of(config: SourceConfig) -> str:
    """Return the name of a configuration's kind."""
    return str(config.__struct_config__.tag)


def encode(config: SourceConfig) -> bytes:
    """Return a configuration as JSON for the catalog."""
    return msgspec.json.encode(config)


def decode(data: bytes | str) -> SourceConfig:
    """Parse a configuration written by `encode` or by a user. Raises `InvalidUsage`, which names
    the invalid field."""
    check_configuration(data)
    try:
        found: SourceConfig = msgspec.json.decode(data, type=_ANY_CONFIG)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(
            f"invalid configuration of a source: {error}{_choice(data, str(error))}"
        ) from None
    return found


def check_names(config: bytes, kind: str) -> None:
    """Raise `InvalidUsage` for an option that this kind of source does not have, with a
    suggestion."""
    # Checked even for kinds that ignore unknown fields: those fields come from stored
    # configurations of other releases, not from users.
    try:
        given = msgspec.json.decode(config, type=dict[str, Any])
    except msgspec.DecodeError:
        return  # `decode` reports the error
    (made,) = (each for each in _MAKERS if each.__struct_config__.tag == kind)
    names = [each.name for each in msgspec.structs.fields(made) if each.name not in OURS]
    for name in given:
        if name not in ("type", *names):
            raise InvalidUsage(
                f"a source of kind {kind} has no option {name!r} (available: "
                f"{', '.join(names)}){nearest_hint(name, names)}"
            )


def _choice(data: bytes | str, error: str) -> str:
    """Return a hint that lists the known options, kinds or values; "" if those are not the
    problem."""
    try:
        given = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return ""
    for kind in _MAKERS:
        if given.get("type") == kind.__struct_config__.tag:
            names = [field.name for field in msgspec.structs.fields(kind) if field.name not in OURS]
            if not set(given) <= {"type", *names}:
                return f"; available options: {', '.join(names)}"
            return choices_hint(kind, error)
    return f"; available kinds: {', '.join(KINDS)}"

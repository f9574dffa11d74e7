"""Configuration of a source of kind `wal`: its acceptors, and the tables of the log's records."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from actors.connectors.sources.file_reading import check_columns
from actors.connectors.sources.generators import at_least
from actors.connectors.sources.json_rows import check_type
from actors.connectors.sources.source import SourceConfig
from actors.connectors.sources.source_secrets import SecretTarget
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.wal.dialling import AcceptorAddress, parse_addresses
from actors.wal.framing import START_LSN, RecordDecoder
from actors.wal.lsn import parse_lsn

TABLES_MAX: Final = 256
_HEX: Final = "0123456789abcdef"


class WalConfig(SourceConfig, frozen=True, kw_only=True, tag="wal"):
    """A timeline of acceptors, as ``penstock wal push`` writes it. It holds no token, but names the
    place from which the service reads it when it connects."""

    acceptors: str
    """All acceptors of the timeline: ``host:port,host:port,…``."""
    tenant: str
    """32 hexadecimal digits."""
    timeline: str
    """32 hexadecimal digits."""
    tables: dict[str, tuple[TableColumn, ...]]
    """Tables that records name, with their columns."""
    undeclared: Literal["refuse", "skip"] = "refuse"
    """Treatment of tables and columns in records that are not in `tables`."""
    start_lsn: str = ""
    """Position where reading begins, the end of a record (``0/1A2B3C8``); empty: the log's
    begin."""
    token_env: str = ""
    """An environment variable of the service that holds the token."""
    token_file: str = ""
    """A file of the service whose first line is the token."""
    sslrootcert: str = ""
    """A file of the service: the authority of the acceptors' certificates. Empty: no TLS, and the
    token is sent to acceptors of this machine alone. It needs `sslcert` and `sslkey`."""
    sslcert: str = ""
    """Our certificate."""
    sslkey: str = ""
    """Key of `sslcert`."""
    feedback: bool = True
    """True to tell acceptors the durable position, so that they may remove the log before it."""
    silence_ms: int = 10_000
    """Time without an answer after which an acceptor is left for another."""
    look_ms: int = 5_000
    """Interval of asking all acceptors for their positions."""

    def check(self) -> None:
        """Raise `InvalidUsage` naming the option that does not fit."""
        self.addresses()
        for name, value in (("tenant", self.tenant), ("timeline", self.timeline)):
            if len(value) != 32 or value.strip(_HEX):
                raise InvalidUsage(f"{name} = {value!r}: give 32 hexadecimal digits, lower case")
        at_least(self, silence_ms=100, look_ms=10)
        if self.token_env and self.token_file:
            raise InvalidUsage("give one of token_env and token_file")
        files = {"sslrootcert": self.sslrootcert, "sslcert": self.sslcert, "sslkey": self.sslkey}
        missing = [name for name, path in files.items() if not path]
        if missing and len(missing) < len(files):
            raise InvalidUsage(f"TLS needs {', '.join(files)}: {', '.join(missing)} not given")
        RecordDecoder(self.begin_lsn())
        if not 0 < len(self.tables) <= TABLES_MAX:
            raise InvalidUsage(
                f"tables = {{…}} with {len(self.tables)} tables: declare 1 to {TABLES_MAX}, each "
                'with its columns, as {"orders": {"id": "bigint", "total": "decimal(12,2)"}}'
            )
        self.schemas()

    def addresses(self) -> tuple[AcceptorAddress, ...]:
        """Return the acceptors' addresses. Raises `InvalidUsage`."""
        return parse_addresses(self.acceptors)

    def secret_targets(self) -> tuple[SecretTarget, ...]:
        """See `SecretUser`."""
        return tuple(SecretTarget(each.host, each.port) for each in self.addresses())

    def begin_lsn(self) -> int:
        """Return the position where reading begins. Raises `InvalidUsage`."""
        return parse_lsn(self.start_lsn) if self.start_lsn else START_LSN

    def schemas(self) -> dict[str, TableSchema]:
        """Return the schemas of all tables. Raises `InvalidUsage`."""
        return {name: _schema(name, columns) for name, columns in self.tables.items()}

    def token(self) -> str:
        """Return the token for acceptors; empty: none. Blocking. Raises `InvalidUsage`."""
        if self.token_env:
            value = os.environ.get(self.token_env)
            if value is None:
                raise InvalidUsage(
                    f"the service has no environment variable {self.token_env} (token_env)"
                )
            return value
        if self.token_file:
            try:
                return Path(self.token_file).read_text().partition("\n")[0].strip()
            except OSError as error:
                raise InvalidUsage(f"token_file {self.token_file}: {error.strerror}") from None
        return ""

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context for acceptors; None: no TLS. Blocking. Raises `InvalidUsage`."""
        if not self.sslrootcert:
            return None
        try:
            context = ssl.create_default_context(cafile=self.sslrootcert)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(self.sslcert, self.sslkey)
        except (OSError, ValueError) as error:
            raise InvalidUsage(
                f"sslrootcert {self.sslrootcert}, sslcert {self.sslcert}, sslkey {self.sslkey}: no"
                f" certificates with a key in PEM: {error}"
            ) from None
        return context


def _schema(name: str, columns: tuple[TableColumn, ...]) -> TableSchema:
    if not name or not columns:
        raise InvalidUsage(f"tables: {name!r} has no {'columns' if name else 'name'}")
    try:
        return check_json(columns)
    except InvalidUsage as error:
        raise InvalidUsage(f"tables: {name}: {error}") from None


def check_json(columns: Sequence[TableColumn]) -> TableSchema:
    """Return the columns as a schema. Raises `InvalidUsage` for those that records cannot hold."""
    schema = check_columns(columns)
    for field in schema.arrow():
        check_type(field.type)
    return schema

"""Configuration of a source of kind `wal`: its acceptors, and the tables in the log's records."""

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
    """A timeline on acceptors, as written by ``penstock wal push``. It contains no token; it names
    where the service reads the token when it connects."""

    acceptors: str
    """All acceptors of the timeline: ``host:port,host:port,…``."""
    tenant: str
    """32 hexadecimal digits."""
    timeline: str
    """32 hexadecimal digits."""
    tables: dict[str, tuple[TableColumn, ...]]
    """Tables that records may name, with their columns."""
    undeclared: Literal["refuse", "skip"] = "refuse"
    """Treatment of a record's tables and columns that are not in `tables`."""
    start_lsn: str = ""
    """Position where reading starts, which must be the end of a record (``0/1A2B3C8``). Empty: the
    start of the log."""
    token_env: str = ""
    """Environment variable of the service that holds the token."""
    token_file: str = ""
    """File of the service whose first line is the token."""
    sslrootcert: str = ""
    """File of the service with the certificate authority of the acceptors. Requires `sslcert` and
    `sslkey`. Empty: no TLS, and the token is sent only to acceptors on this machine."""
    sslcert: str = ""
    """File of the service with its client certificate."""
    sslkey: str = ""
    """File of the service with the private key of `sslcert`."""
    feedback: bool = True
    """True to report the durable position to the acceptors, so that they may remove the log before
    it."""
    silence_ms: int = 10_000
    """Time without an answer after which the source switches to another acceptor, in ms."""
    look_ms: int = 5_000
    """Interval in ms at which all acceptors are asked for their positions."""

    def check(self) -> None:
        """Raise `InvalidUsage`, which names the invalid option."""
        self.addresses()
        for name, value in (("tenant", self.tenant), ("timeline", self.timeline)):
            if len(value) != 32 or value.strip(_HEX):
                raise InvalidUsage(
                    f"invalid {name} {value!r}: expected 32 lower-case hexadecimal digits"
                )
        at_least(self, silence_ms=100, look_ms=10)
        if self.token_env and self.token_file:
            raise InvalidUsage("give only one of token_env and token_file")
        files = {"sslrootcert": self.sslrootcert, "sslcert": self.sslcert, "sslkey": self.sslkey}
        missing = [name for name, path in files.items() if not path]
        if missing and len(missing) < len(files):
            raise InvalidUsage(f"TLS needs all of {', '.join(files)}: {', '.join(missing)} not set")
        RecordDecoder(self.begin_lsn())
        if not 0 < len(self.tables) <= TABLES_MAX:
            raise InvalidUsage(
                f"invalid number of tables {len(self.tables)}: declare 1 to {TABLES_MAX}, each "
                "with its columns, as in "
                f'{{"orders": {{"id": "bigint", "total": "decimal(12,2)"}}}}'
            )
        self.schemas()

    def addresses(self) -> tuple[AcceptorAddress, ...]:
        """Return the acceptors' addresses. Raises `InvalidUsage` for an invalid address."""
        return parse_addresses(self.acceptors)

    def secret_targets(self) -> tuple[SecretTarget, ...]:
        """Return the acceptors' hosts."""
        return tuple(SecretTarget(each.host, each.port) for each in self.addresses())

    def begin_lsn(self) -> int:
        """Return the LSN where reading starts. Raises `InvalidUsage` for an invalid `start_lsn`."""
        return parse_lsn(self.start_lsn) if self.start_lsn else START_LSN

    def schemas(self) -> dict[str, TableSchema]:
        """Return the schema of each table, by name. Raises `InvalidUsage` for an unsupported
        column."""
        return {name: _schema(name, columns) for name, columns in self.tables.items()}

    def token(self) -> str:
        """Read the token for the acceptors; "" if there is none. Blocking. Raises
        `InvalidUsage`."""
        if self.token_env:
            value = os.environ.get(self.token_env)
            if value is None:
                raise InvalidUsage(
                    f"environment variable {self.token_env} of the service is not set (token_env)"
                )
            return value
        if self.token_file:
            try:
                return Path(self.token_file).read_text().partition("\n")[0].strip()
            except OSError as error:
                raise InvalidUsage(
                    f"cannot read token_file {self.token_file}: {error.strerror}"
                ) from None
        return ""

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context for connections to the acceptors; None for no TLS. Blocking.
        Raises `InvalidUsage`."""
        if not self.sslrootcert:
            return None
        try:
            context = ssl.create_default_context(cafile=self.sslrootcert)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(self.sslcert, self.sslkey)
        except (OSError, ValueError) as error:
            raise InvalidUsage(
                f"cannot load PEM certificates and key from sslrootcert {self.sslrootcert}, "
                f"sslcert {self.sslcert}, sslkey {self.sslkey}: {error}"
            ) from None
        return context


def _schema(name: str, columns: tuple[TableColumn, ...]) -> TableSchema:
    if not name or not columns:
        raise InvalidUsage(f"invalid tables: {name!r} has no {'columns' if name else 'name'}")
    try:
        return check_json(columns)
    except InvalidUsage as error:
        raise InvalidUsage(f"invalid tables: {name}: {error}") from None


def check_json(columns: Sequence[TableColumn]) -> TableSchema:
    """Return the columns as a schema. Raises `InvalidUsage` for types that JSON records cannot
    hold."""
    schema = check_columns(columns)
    for field in schema.arrow():
        check_type(field.type)
    return schema

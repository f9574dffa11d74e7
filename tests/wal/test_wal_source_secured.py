"""A log's source and acceptors that others reach: TLS both ways, and a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trustme
from wal_nodes import TENANT, TIMELINE, Node, append  # type: ignore[import-not-found]

from actors.connectors.sources.source import (
    ConnectorContext,
    Given,
    PositionMark,
    SourceRows,
    SourceUnreachable,
)
from actors.connectors.sources.source_secrets import check_secrets
from actors.connectors.sources.wal import WalSource
from actors.connectors.sources.wal_config import WalConfig
from actors.model.plan.schema import TableColumn
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.runtime.transport.security import TransportSecurity

TOKEN = "a-token-of-sixteen"


class Files:
    """Certificates of one authority, and one of another; a token."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        authority, other = trustme.CA(), trustme.CA()
        self.folder = folder
        for name, issued in (
            ("acceptor", authority.issue_cert("127.0.0.1")),
            ("service", authority.issue_cert("service")),
            ("stranger", other.issue_cert("service")),
        ):
            issued.private_key_and_cert_chain_pem.write_to_path(self.path(name))
            Path(self.path(name)).chmod(0o600)
        authority.cert_pem.write_to_path(self.path("authority"))
        Path(self.path("token")).write_text(f"{TOKEN}\n")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def security(self, name: str) -> TransportSecurity:
        return TransportSecurity(self.path(name), self.path(name), self.path("authority"))

    def options(self, name: str) -> dict[str, str]:
        own = self.path(name)
        return {"sslrootcert": self.path("authority"), "sslcert": own, "sslkey": own}


def config(acceptors: str, **options: Any) -> WalConfig:
    tables: dict[str, tuple[TableColumn, ...]] = {"orders": (TableColumn("id", "bigint"),)}
    return WalConfig(
        acceptors=acceptors, tenant=TENANT, timeline=TIMELINE, tables=tables, **options
    )


async def test_a_log_is_read_over_tls_with_a_token(tmp_path: Path) -> None:
    files = Files(tmp_path / "secrets")
    server = files.security("acceptor").context(server=True)
    writer = files.security("service").context(server=False)
    node = Node(tmp_path / "acceptor", 1, tls=server, token=TOKEN)
    await node.up()
    try:
        line = json.dumps({"table": "orders", "row": {"id": 7}}).encode()
        await append([node], [line], tls=writer, token=TOKEN)
        around = ConnectorContext(SystemClock(), Settings(), tmp_path)
        given = {"token_file": files.path("token")}
        source = WalSource(config(str(node.address), **given, **files.options("service")), around)
        await source.open(await source.describe(None), None)
        found: list[Given] = []
        while not found or not isinstance(found[-1], PositionMark):
            found.append(await source.next())
        rows = [each.updates["id"].to_pylist() for each in found if isinstance(each, SourceRows)]
        assert rows == [[7]]
        await source.close()
        for wrong in ({}, given, files.options("service"), given | files.options("stranger")):
            with pytest.raises(SourceUnreachable, match="no acceptor responds"):
                await WalSource(config(str(node.address), **wrong), around).describe(None)
    finally:
        await node.down()


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    files = Files(tmp_path / "secrets")
    with pytest.raises(InvalidUsage, match=r"TLS needs .*: sslkey not set"):
        config("a:1", **{**files.options("service"), "sslkey": ""}).check()
    with pytest.raises(InvalidUsage, match="cannot load PEM certificates and key"):
        config("a:1", **{**files.options("service"), "sslkey": files.path("authority")}).tls()


def test_only_files_for_sources_may_be_used(tmp_path: Path) -> None:
    files = Files(tmp_path / "secrets")
    whole = config("a:1", **files.options("service"))
    check_secrets(whole, Settings(secret_dir=str(tmp_path / "secrets")))
    for settings in (Settings(), Settings(secret_dir=str(tmp_path / "elsewhere"))):
        with pytest.raises(InvalidUsage, match="secret_dir"):
            check_secrets(whole, settings)

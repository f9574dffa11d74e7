"""A service behind TLS and tokens: clients, commands, controllers; the engine is in memory."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import trustme

from actors.doors.client.client import Client
from actors.model.protocol.compute import CreateInstance, Hello, InitializationComplete
from actors.replica.cluster import connect
from actors.runtime.errors import AuthenticationFailed, BadSettings, ConnectionBroken, WrongService
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine


def secured(folder: Path, **fields: Any) -> Settings:
    """Settings of both sides: one authority, one certificate for 127.0.0.1, a token for each
    listener."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "both.pem"))
    (folder / "token").write_text("c" * 32 + "\n")
    (folder / "cluster-token").write_text("r" * 32 + "\n")
    for name in ("both.pem", "token", "cluster-token"):
        (folder / name).chmod(0o600)
    return Settings(
        state_dir=str(folder / "state"),
        listen="127.0.0.1:0",
        identity="blue",
        tls_certificate=str(folder / "both.pem"),
        tls_key=str(folder / "both.pem"),
        tls_authority=str(folder / "ca.pem"),
        token_file=str(folder / "token"),
        cluster_token_file=str(folder / "cluster-token"),
        **fields,
    )


async def test_clients_prove_themselves_and_work(tmp_path: Path) -> None:
    settings = secured(tmp_path)
    with anyio.fail_after(200):
        async with Service(settings, engine=in_memory_engine()) as service:
            async with await Client.connect(service.address, settings=settings) as client:
                await client.create_table("t", {"n": "bigint"})
                await client.insert("t", [{"n": 1}])
                assert (await client.peek("t")).to_pylist() == [{"n": 1}]
            with pytest.raises(ConnectionBroken):
                await Client.connect(service.address)
            for name, kind in (("token_file", AuthenticationFailed), ("identity", WrongService)):
                value = {"token_file": settings.cluster_token_file, "identity": "green"}[name]
                changed = msgspec.structs.replace(settings, **{name: value})
                with pytest.raises(kind):
                    await Client.connect(service.address, settings=changed)


async def test_commands_prove_themselves_by_flags_or_the_environment(tmp_path: Path) -> None:
    settings = secured(tmp_path)
    names = ("tls_certificate", "tls_key", "tls_authority", "token_file", "identity")
    values = {name: getattr(settings, name) for name in names}
    flags = [text for name in names for text in (f"--{name.replace('_', '-')}", values[name])]
    variables = {f"PENSTOCK_{name.upper()}": value for name, value in values.items()}
    with anyio.fail_after(200):
        async with Service(settings, engine=in_memory_engine()) as service:
            async with await Client.connect(service.address, settings=settings) as client:
                await client.create_table("t", {"n": "bigint"})
            status = [sys.executable, "-m", "actors.doors.commands.cli", "status", "--json"]
            status += ["--connect", service.address]
            for more, env in ((flags, {}), ([], variables)):
                done = await anyio.run_process([*status, *more], env={**os.environ, **env})
                assert [one["name"] for one in json.loads(done.stdout)["objects"]] == ["t"]
            wrong = await anyio.run_process(
                [*status, *flags, "--identity", "green"], check=False, env=dict(os.environ)
            )
            assert wrong.returncode == 2
            assert b"WrongService" in wrong.stderr


async def test_controllers_prove_themselves_with_tokens_of_their_own(tmp_path: Path) -> None:
    settings = secured(tmp_path, cluster_listen="127.0.0.1:0")
    with anyio.fail_after(200):
        async with Service(settings, engine=in_memory_engine()) as service:
            assert service.cluster_address
            as_client = msgspec.structs.replace(settings, cluster_token_file=settings.token_file)
            with pytest.raises(AuthenticationFailed, match="token is not valid"):
                await connect(service.cluster_address, as_client)
            controller = await connect(service.cluster_address, settings)
            for command in (
                Hello("n"),
                CreateInstance(settings.workers),
                InitializationComplete(),
            ):
                await controller.send(command)
            await controller.close()


async def test_other_machines_are_refused_at_start_without_tls_and_tokens(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    places: list[dict[str, Any]] = [{"listen": "0.0.0.0:0"}, {"cluster_listen": "[::]:0"}]
    for fields in places:
        settings = Settings(**({"state_dir": state, "listen": "127.0.0.1:0"} | fields))
        with pytest.raises(BadSettings, match=r"listen = .*needs TLS and tokens"):
            await Service(settings, engine=in_memory_engine()).__aenter__()
    whole = secured(tmp_path)
    settings = msgspec.structs.replace(whole, listen="0.0.0.0:0", cluster_listen="0.0.0.0:0")
    async with Service(settings, engine=in_memory_engine()) as service:
        assert service.address.startswith("0.0.0.0:")


async def test_a_service_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    settings = Settings(state_dir=str(tmp_path / "state"), listen=f"unix:{path}")
    with anyio.fail_after(200):
        async with Service(settings, engine=in_memory_engine()) as service:
            assert service.address == f"unix:{path}"
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            async with await Client.connect(service.address) as client:
                await client.create_table("t", {"n": "bigint"})
        assert not path.exists()

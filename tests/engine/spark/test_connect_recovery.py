"""A Spark Connect server that asks for a token, dies and comes back; sessions that it forgot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from connect_server import (  # type: ignore[import-not-found]
    TOKEN,
    TOKEN_WRITTEN,
    ConnectServer,
)

from actors.engine.spark.java import JavaHome
from actors.engine.spark_executor import SparkExecutor
from actors.model.plan.jobs import AnalyzeStatement, Job, QueryAnalyzed, QueryFiles, SubmitJob
from actors.runtime.errors import EngineUnavailable, JobTooLarge
from actors.runtime.kernel import ActorAddress, ActorSystem, ReplySlot
from actors.runtime.settings import Settings
from actors.testing.postgres_server import reserve_port

pytestmark = [pytest.mark.spark, pytest.mark.long]

FOREVER = "SELECT sum(hash(a.id * b.id)) AS x FROM range(10000000) a CROSS JOIN range(10000000) b"
SECRETS = (TOKEN, TOKEN_WRITTEN)


def settings_of(port: int, token: str, **more: Any) -> Settings:
    return Settings(
        spark_master=f"sc://localhost:{port}/;token={token}",
        engine_jobs_in_flight_max=2,
        retry_delay_ms_max=500,
        **more,
    )


def analyze(name: str) -> AnalyzeStatement:
    return AnalyzeStatement(name, (), "SELECT 1")


async def ask(engine: ActorAddress[Any], job: Job) -> Any:
    reply: ReplySlot[Any] = ReplySlot()
    await engine.send(SubmitJob(job, reply))
    return await reply.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, java: JavaHome) -> Iterator[ConnectServer]:
    with reserve_port() as held:  # it is down for a while, and comes back there
        port = held.getsockname()[1]
        made = ConnectServer(tmp_path_factory.mktemp("server"), java, port=port, token=TOKEN)
        yield made
        made.kill()


async def test_a_wrong_token(server: ConnectServer, tmp_path: Path) -> None:
    async with ActorSystem() as system:
        engine: ActorAddress[Any] = system.spawn(
            lambda: SparkExecutor(settings_of(server.port, "wr0ng"), tmp_path / "other"), "engine"
        )
        with (
            anyio.fail_after(200),
            pytest.raises(EngineUnavailable, match=r"(?i)authenticat") as no,
        ):
            await ask(engine, analyze("refused"))
        assert "wr0ng" not in str(no.value)


async def test_a_server_that_dies_and_comes_back(
    server: ConnectServer, tmp_path: Path, java: JavaHome
) -> None:
    """The last test here: it ends the server that all have."""
    settings = settings_of(server.port, TOKEN_WRITTEN, engine_attempts_max=1)
    log = tmp_path / "engine" / "engine.log"
    async with ActorSystem() as system:
        engine: ActorAddress[Any] = system.spawn(
            lambda: SparkExecutor(settings, tmp_path / "engine"), "engine"
        )
        assert isinstance(await ask(engine, analyze("first")), QueryAnalyzed)
        assert any("over Spark Connect" in text for _, text in system.describe())
        running: ReplySlot[Any] = ReplySlot()
        await engine.send(SubmitJob(QueryFiles("forever", FOREVER, ()), running))
        await ask(engine, analyze("between"))  # in order: the first is at work
        server.kill()
        with anyio.fail_after(200), pytest.raises(JobTooLarge, match="its server does not answer"):
            await running.wait()
        with anyio.fail_after(200), pytest.raises(EngineUnavailable) as caught:
            await ask(engine, analyze("away"))
        assert f"sc://localhost:{server.port}" in str(caught.value)
        assert "sesame" not in str(caught.value)
        again = ConnectServer(tmp_path / "again", java, port=server.port, token=TOKEN)
        try:
            while not await answers(engine):
                await anyio.sleep(0.1)
        finally:
            again.kill()
    assert "sesame" not in log.read_text()


async def answers(engine: ActorAddress[Any]) -> bool:
    try:
        return isinstance(await ask(engine, analyze("again")), QueryAnalyzed)
    except EngineUnavailable:
        return False

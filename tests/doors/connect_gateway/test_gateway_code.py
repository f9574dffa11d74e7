"""What a role may do over Spark Connect without the right to run code: Spark is not even asked."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from gateway_world import GatewayWorld, fill, gateway_world  # type: ignore[import-not-found]
from pyspark.errors import PySparkException
from pyspark.sql.connect import functions as f
from pyspark.sql.connect.proto import base_pb2
from pyspark.sql.connect.session import SparkSession
from pyspark.sql.types import LongType, StructType

from actors.control.access.role_registry import token_digest
from actors.doors.connect_gateway.plan_rights import check_form
from actors.doors.connect_gateway.session_settings import SET_WITHOUT_CODE
from actors.model.plan.jobs import ParseText, StatementParsed
from actors.model.protocol.role_messages import AlterRole, ChangeRights, CreateRole

TOKEN = "a" * 64


@dataclasses.dataclass
class Guarded:
    """A service with a role that may read two objects, and a session of it."""

    world: GatewayWorld
    app: Any

    async def run(self, call: Any) -> Any:
        return await self.world.run(call)

    async def refused(self, call: Any, *, state: str = "42501") -> str:
        """What is said of a call; Spark was not asked for anything by it."""
        before = len(self.world.spark.requests)
        with pytest.raises(PySparkException) as failed:
            await self.world.run(call)
        asked = self.world.spark.requests[before:]
        # Clients ask for columns and settings by themselves: nothing that is refused is among it.
        assert not [each for each in asked if each.DESCRIPTOR.name == "ExecutePlanRequest"]
        for each in asked:
            check_form(each, "app")
        assert failed.value.getSqlState() == state, failed.value
        return str(failed.value)

    async def change(self, right: str, *, revoke: bool = False) -> None:
        await self.world.client.submit(ChangeRights(0, ("app",), (right,), revoke=revoke))

    async def session(self, more: str = "") -> Any:
        port = self.world.service.connect_address.rpartition(":")[2]
        address = f"sc://localhost:{port}/;token={TOKEN}{more}"
        made = await self.world.run(lambda: SparkSession(address))
        self.world._sessions.append(made)
        return made


async def seen(condition: Callable[[], bool]) -> None:
    while not condition():
        await anyio.sleep(0.01)


@asynccontextmanager
async def guarded(tmp_path: Path, **changes: Any) -> AsyncIterator[Guarded]:
    async with gateway_world(tmp_path, **changes) as world:
        await fill(world.client)
        await world.client.submit(CreateRole(0, "boss", login=True))
        await world.client.submit(CreateRole(0, "app", login=True))
        await world.client.submit(AlterRole(0, "app", add_token=token_digest(TOKEN)))
        await world.client.submit(
            ChangeRights(0, ("app",), ("read",), scope="objects", names=("orders", "sums"))
        )
        await world.client.submit(
            ChangeRights(0, ("app",), ("write",), scope="objects", names=("other",))
        )
        made = Guarded(world, None)
        made.app = await made.session()
        yield made


async def test_code_files_and_names_of_others_are_refused_before_spark_sees_them(
    tmp_path: Path,
) -> None:
    async with guarded(tmp_path) as house:
        app, one = house.app, house.app.range(1)
        double = f.udf(lambda x: x, LongType())
        long = StructType().add("id", LongType())

        def rows(frames: Any) -> Any:
            return frames

        calls = [
            ("Read.data_source", lambda: app.read.text("/etc/passwd").collect()),
            ("Read.data_source", lambda: app.read.format("jdbc").load().collect()),
            ("common_inline_user_defined_function", lambda: one.select(double("id")).collect()),
            ("map_partitions", lambda: one.mapInPandas(rows, long).collect()),
            ("group_map", lambda: one.groupBy("id").applyInPandas(rows, long).collect()),
            (
                "co_group_map",
                lambda: (
                    one.groupBy("id").cogroup(one.groupBy("id")).applyInPandas(lambda a, b: a, long)
                ).collect(),
            ),
            ("Command.register_function", lambda: app.udf.register("double", double)),
            (
                "Command.register_function",
                lambda: app.udf.registerJavaFunction("j", "org.example.J", LongType()),
            ),
            (
                "Expression.call_function",
                lambda: one.select(f.call_function("upper", "id")).collect(),
            ),
            ("function reflect", lambda: one.select(f.reflect(f.lit("a"))).collect()),
            ("function input_file_name", lambda: one.select(f.input_file_name()).collect()),
            ("WriteOperation.", lambda: one.write.parquet("/tmp/written")),
            ("relation a.b", lambda: app.table("a.b").collect()),
            ("relation parquet./etc/passwd", lambda: app.table("parquet.`/etc/passwd`").collect()),
            (
                "relation global_temp.penstock_rows_1",
                lambda: app.table("global_temp.penstock_rows_1").collect(),
            ),
            ("relation parquet./etc", lambda: app.catalog.tableExists("parquet.`/etc`")),
            ("Catalog.set_current_catalog", lambda: app.catalog.setCurrentCatalog("c")),
            ("Catalog.refresh_by_path", lambda: app.catalog.refreshByPath("/tmp")),
            ("Catalog.create", lambda: app.catalog.createTable("t", path="/tmp", source="csv")),
            ("Catalog.recover_partitions", lambda: app.catalog.recoverPartitions("orders")),
            ("is_global", lambda: one.createGlobalTempView("g")),
            ("a checkpoint in files", lambda: one.checkpoint(eager=False)),
            ("AnalyzePlanRequest.input_files", lambda: one.inputFiles()),
            (
                "a stream into console",
                lambda: app.readStream.table("orders").writeStream.format("console").start(),
            ),
            (
                "foreach_batch",
                lambda: app.readStream.table("orders").writeStream.foreachBatch(rows).start(),
            ),
            ("AddArtifactsRequest", lambda: app.addArtifacts(__file__, pyfile=True)),
            ("function reflect", lambda: one.selectExpr("reflect('a', 'b')").collect()),
            ("function REFLECT", lambda: one.filter("REFLECT('a', 'b') = ''").collect()),
            ("function try_reflect", lambda: app.sql("SELECT try_reflect('a', 'b')").collect()),
            ("statement set", lambda: app.sql("SET spark.sql.variable.substitute = true")),
        ]
        for wanted, call in calls:
            said = await house.refused(call)
            assert "GRANT EXECUTE CODE TO app" in said, wanted
            assert wanted in said


async def test_frames_are_looked_at_wherever_spark_is_given_them(tmp_path: Path) -> None:
    async with guarded(tmp_path) as house:
        app, one = house.app, house.app.range(1)
        reflected = one.selectExpr("reflect('a', 'b')")
        calls = [
            ("function reflect", lambda: reflected.schema),
            ("function reflect", lambda: reflected.explain()),
            ("function reflect", lambda: reflected.createOrReplaceTempView("v")),
            ("function reflect", lambda: reflected.write.insertInto("other")),
            ("relation a.b", lambda: app.table("a.b").schema),
            ("relation a.b", lambda: one.writeTo("a.b").append()),
            ("relation a.b", lambda: one.write.mode("append").saveAsTable("a.b")),
            ("relation a.b", lambda: app.readStream.table("a.b").schema),
        ]
        for wanted, call in calls:
            said = await house.refused(call)
            assert "GRANT EXECUTE CODE TO app" in said, wanted
            assert wanted in said


STATEMENTS = [
    "CREATE TEMPORARY FUNCTION g AS 'a.B'",
    "ADD JAR '/tmp/x.jar'",
    "CREATE TABLE t USING parquet LOCATION '/tmp/t' AS SELECT 1",
    "INSERT OVERWRITE DIRECTORY '/tmp/t' USING parquet SELECT 1",
    "LOAD DATA INPATH '/etc/passwd' INTO TABLE t",
    "SELECT * FROM parquet.`/etc/passwd`",
    "SELECT * FROM global_temp.penstock_rows_1",
    "EXPLAIN SELECT 1",
    "USE other",
    "RESET",
    "CREATE GLOBAL TEMPORARY VIEW v AS SELECT 1",
    "CREATE TEMPORARY VIEW v AS SELECT reflect('a', 'b')",
    "CREATE TEMPORARY VIEW v AS SELECT * FROM csv.`/etc/passwd`",
    "CREATE TEMPORARY VIEW v AS DROP TABLE x",
    "CREATE TEMPORARY VIEW v USING csv OPTIONS (path '/etc/passwd')",
    "CACHE TABLE x AS SELECT 1",
]


async def test_commands_in_texts_are_refused_before_spark_sees_them(tmp_path: Path) -> None:
    async with guarded(tmp_path) as house:
        for statement in STATEMENTS:
            before = len(house.world.spark.of_kind("ExecutePlanRequest"))
            with pytest.raises(PySparkException):
                await house.run(lambda text=statement: house.app.sql(text).collect())
            assert len(house.world.spark.of_kind("ExecutePlanRequest")) == before, statement
        # A name of nothing is told as Spark tells it, whatever Spark has of that name.
        said = await house.refused(lambda: house.app.sql("SELECT * FROM of_spark"), state="42P01")
        assert "of_spark" in said
        await house.refused(lambda: house.app.table("of_spark").collect(), state="42P01")


async def test_objects_frames_and_views_over_them_are_there(tmp_path: Path) -> None:
    async with guarded(tmp_path) as house:
        app = house.app
        counted = app.table("orders").join(app.range(9), "id").groupBy("name").count()
        assert (await house.run(counted.toArrow)).num_rows == 6
        found = await house.run(lambda: app.sql("SELECT upper(name) FROM default.orders").toArrow())
        assert found.num_rows == 6
        make = app.createDataFrame
        small = await house.run(lambda: make([(1, "x")], "id bigint, x string"))
        await house.run(lambda: small.filter("id > 0").selectExpr("x AS y").toArrow())
        await house.run(lambda: small.createOrReplaceTempView("mine"))
        await house.run(lambda: app.sql("SELECT * FROM mine JOIN orders USING (id)").toArrow())
        await house.run(lambda: app.table("mine").toArrow())
        await house.run(lambda: app.sql("SELECT * FROM {small}", small=small).toArrow())
        # Spark makes the rows of an INSERT from a view of the session.
        assert "function reflect" in await house.refused(
            lambda: app.sql("INSERT INTO other SELECT id, reflect('a', 'b') FROM mine")
        )
        await house.run(lambda: app.sql("DROP VIEW mine"))
        await house.refused(lambda: app.table("mine").toArrow(), state="42P01")
        # A view by a text is never given to Spark as a statement.
        await house.run(lambda: app.sql("CREATE TEMP VIEW mine AS SELECT 1 AS one"))
        assert not [
            each
            for each in house.world.spark.of_kind("ExecutePlanRequest")
            if "CREATE" in str(each.plan)
        ]
        await house.run(lambda: app.table("mine").toArrow())
        assert await house.run(lambda: app.catalog.tableExists("orders"))
        shown = await house.run(lambda: app.sql("SHOW TABLES").toArrow())
        assert "sums" in shown.column("tableName").to_pylist()
        rows = await house.run(lambda: make([(50, 2.5)], "id bigint, x double"))
        await house.run(lambda: rows.write.insertInto("other"))
        assert len(await house.world.client.peek("other")) == 5
        # Rights on objects are what they were.
        assert "GRANT READ ON other TO app" in await house.refused(
            lambda: app.table("other").toArrow()
        )


async def test_settings_are_those_of_a_list(tmp_path: Path) -> None:
    async with guarded(tmp_path) as house:
        conf, spark = house.app.conf, house.world.spark
        await house.run(lambda: house.app.range(1).toArrow())
        assert spark.settings["spark.sql.variable.substitute"] == "false"
        assert "spark.sql.session.timeZone" in SET_WITHOUT_CODE
        await house.run(lambda: conf.set("spark.sql.session.timeZone", "UTC"))
        assert spark.settings["spark.sql.session.timeZone"] == "UTC"
        assert await house.run(lambda: conf.get("spark.sql.session.timeZone")) == "UTC"
        await house.run(lambda: conf.unset("spark.sql.session.timeZone"))
        before = dict(spark.settings)
        for name in (
            "spark.sql.variable.substitute",
            "spark.sql.runSQLOnFiles",
            "spark.sql.catalog.p",
            "spark.sql.extensions",
            "spark.sql.ansi.doubleQuotedIdentifiers",
            "spark.sql.caseSensitive",
            "spark.jars",
            "spark.sql.SESSION.timezone",
        ):
            for change in (conf.unset, lambda each: conf.set(each, "true")):
                said = await house.refused(lambda name=name, change=change: change(name))
                assert f"setting {name}" in said
        assert "in its value" in await house.refused(
            lambda: conf.set("spark.sql.session.timeZone", "${env:HOME}")
        )
        with pytest.raises(PySparkException, match="too many partitions"):
            await house.run(lambda: conf.set("spark.sql.shuffle.partitions", "100000000"))
        assert spark.settings == before
        secret = "spark.connect.authenticate.token"
        for call in (lambda: conf.get(secret), lambda: conf.get(secret, "x")):
            assert f"setting {secret}" in await house.refused(call)


async def test_of_all_settings_those_alone_are_told_that_may_be_seen(tmp_path: Path) -> None:
    async with guarded(tmp_path) as house:
        house.world.spark.settings["spark.connect.authenticate.token"] = "secret"
        wanted = base_pb2.ConfigRequest.Operation(get_all=base_pb2.ConfigRequest.GetAll())
        found = await house.run(lambda: house.app.client.config(wanted))
        assert ("spark.sql.variable.substitute", "false") in found.pairs
        assert "secret" not in str(found.pairs)
        await house.change("execute code")
        found = await house.run(lambda: house.app.client.config(wanted))
        assert "secret" in str(found.pairs)


async def test_with_the_right_all_is_as_it_was(tmp_path: Path) -> None:
    async with guarded(tmp_path) as house:
        # The session that is open goes on with it, too.
        await house.refused(lambda: house.app.read.text("/etc/passwd").toArrow())
        await house.change("execute code")
        await house.run(lambda: house.app.read.text("/etc/passwd").toArrow())
        await house.run(lambda: house.app.sql("SET a = b"))
        await house.run(lambda: house.app.conf.set("spark.sql.runSQLOnFiles", "true"))
        assert house.world.controls.counts[ParseText.__struct_config__.tag] == 0


async def test_a_session_ends_with_the_right_that_it_ran_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No sweep comes: the change itself ends the sessions.
    monkeypatch.setattr("actors.doors.connect_gateway.server.SWEEP_MS", 1 << 40)
    async with guarded(tmp_path) as house:
        await house.change("execute code")
        ran = await house.session()
        await house.run(lambda: ran.range(1).toArrow())
        clone = await house.run(lambda: ran.cloneSession()) if hasattr(ran, "cloneSession") else ran
        other = await house.session()
        await house.change("execute code", revoke=True)
        # Functions of theirs may be left at Spark, which refuses a session that was released.
        released = house.world.spark.released
        await seen(lambda: {ran.session_id, clone.session_id} <= {*released})
        assert other.session_id not in released
        fresh = await house.session()
        await house.run(lambda: fresh.range(1).toArrow())
        await house.change("connect", revoke=True)
        await seen(lambda: fresh.session_id in released)


async def test_sessions_without_their_right_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.doors.connect_gateway.server.SWEEP_MS", 20)
    async with guarded(tmp_path) as house:
        await house.change("execute code")
        ran = await house.session()
        await house.run(lambda: ran.range(1).toArrow())
        await house.run(lambda: house.app.range(1).toArrow())
        await house.change("execute code", revoke=True)
        released = house.world.spark.released
        await seen(lambda: ran.session_id in released)
        fresh = await house.session()
        await house.run(lambda: fresh.range(1).toArrow())
        assert fresh.session_id not in released
        # Without CONNECT nobody can come back to it.
        await house.change("connect", revoke=True)
        await seen(lambda: fresh.session_id in released)


async def test_what_the_names_in_a_text_are_is_sparks_parsers_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[str, StatementParsed] = {}

    def parsed(job: ParseText) -> StatementParsed:
        found = answers.get(job.sql, StatementParsed(""))
        return msgspec.structs.replace(found, job_id=job.job_id)

    monkeypatch.setattr("actors.testing.engine.parsed", parsed)
    async with guarded(tmp_path) as house:
        ask = "SELECT 1 AS a"
        run = lambda: house.app.sql(ask).toArrow()  # noqa: E731
        # It has the name that names of several parts have no part of.
        await house.run(lambda: house.app.range(1).createOrReplaceTempView(""))
        for answer, wanted in (
            (StatementParsed("", command="X"), "statement X"),
            (StatementParsed("", kind="option", refused="o"), "option o"),
            (StatementParsed("", unknown=("g",)), "function g"),
            (StatementParsed("", relations=(("a", "b"),)), "relation a.b"),
            # It is an object, but was not found in the text, and so would not be replaced.
            (StatementParsed("", relations=(("orders",),)), "relation orders"),
        ):
            # Another text each time: the parse of one is remembered.
            ask += " "
            answers[ask] = answer
            assert wanted in await house.refused(run)
        ask += " "
        await house.run(run)
        jobs = house.world.controls.counts[ParseText.__struct_config__.tag]
        await house.run(run)
        assert house.world.controls.counts[ParseText.__struct_config__.tag] == jobs

"""The gateway before a server that stands for Spark, with an unmodified PySpark session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import grpc
import pyarrow as pa
import pytest
import trustme
from gateway_world import (  # type: ignore[import-not-found]
    GatewayWorld,
    fill,
    filled_world,
    gateway_world,
    local_relations,
    rows_in,
)
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.connect import functions as sf
from pyspark.sql.connect.proto import base_pb2

from actors.doors.connect_gateway.server import bind_gateway
from actors.doors.connect_gateway.statement_execution import StatementAnswer
from actors.runtime.errors import AddressInUse, BadSettings, QueryRejected
from actors.runtime.metric_table import SESSIONS, STATEMENT_ERRORS, STATEMENT_SECONDS
from actors.runtime.settings import Settings
from tests.kit.loop_turns import bounded_turns


def executed(world: GatewayWorld) -> list[Any]:
    """The plans that Spark was given to execute."""
    return [each.plan for each in world.spark.of_kind("ExecutePlanRequest")]


async def test_what_names_no_object_passes_as_it_is(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        spark = await world.session()
        frame = await world.run(lambda: spark.range(3).filter("id > 1").toArrow())
        assert frame.to_pydict() == {"a": [1]}
        (plan,) = executed(world)
        assert plan.root.filter.input.range.end == 3
        assert world.spark.settings["spark.scheduler.pool"] == "clients"


async def test_plain_reads_need_no_spark(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):

        def read() -> list[Any]:
            table = spark.table("orders")
            return [
                table.filter(sf.col("n") > 3).select("id", "name").toArrow().to_pylist(),
                spark.sql("SELECT id FROM default.orders WHERE name = 'a' ORDER BY id").collect(),
                table.schema.simpleString(),
                spark.sql("SELECT name FROM penstock.objects ORDER BY name").toPandas()["name"],
                spark.sql("SELECT * FROM orders WHERE id < 0").toArrow().num_rows,
            ]

        frame, rows, schema, names, none = await world.run(read)
        assert sorted(row["id"] for row in frame) == [4, 5]
        assert [row.id for row in rows] == [0, 3]
        assert schema == "struct<id:bigint,name:string,n:int>"
        assert list(names) == ["orders", "other", "sums"]
        assert none == 0
        assert executed(world) == []
        assert world.spark.of_kind("AnalyzePlanRequest") == []


async def test_a_read_sees_every_acknowledged_write(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):
        for number in range(10, 20):
            await world.client.insert("orders", [{"id": number, "name": "z", "n": number}])
            rows = await world.run(
                lambda: spark.sql("SELECT c FROM sums WHERE name = 'z'").collect()
            )
            assert [row.c for row in rows] == [number - 9]


async def test_names_become_rows_at_one_time(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):

        def join() -> pa.Table:
            return spark.range(9).join(spark.table("orders"), "id").toArrow()

        assert (await world.run(join)).num_rows == 6  # the stand-in does not join
        (plan,) = executed(world)
        assert "named_table" not in str(plan)
        assert plan.root.join.right.subquery_alias.alias == "orders"
        assert rows_in(plan.root.join.right).num_rows == 6
        text = "SELECT * FROM orders o JOIN sums USING (name)"
        await world.run(lambda: spark.sql(text).toArrow())
        command, query = executed(world)[1:]
        assert command.command.sql_command.input.with_relations.root.sql.query == text
        assert all(not each.data for each in local_relations(command))  # analysed only
        told = query.root.with_relations
        assert [each.subquery_alias.alias for each in told.references] == ["orders", "sums"]
        assert len(local_relations(query)) == 2


async def test_a_frame_of_a_text_reads_anew_each_time(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):
        frame = await world.run(lambda: spark.sql("SELECT count(*) FROM orders"))
        assert (await world.run(frame.toArrow)).num_rows == 6
        await world.client.insert("orders", [{"id": 100, "name": "x", "n": 1}])
        assert (await world.run(frame.toArrow)).num_rows == 7


async def test_analysis_is_given_no_rows(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):
        await world.run(lambda: spark.table("orders").distinct().schema)
        (request,) = world.spark.of_kind("AnalyzePlanRequest")
        (rows,) = local_relations(request)
        assert (rows.data, "bigint" in rows.schema or "long" in rows.schema) == (b"", True)


async def test_temporary_views_are_definitions(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):

        def define() -> None:
            spark.table("orders").distinct().createOrReplaceTempView("mine")
            spark.sql("CREATE TEMP VIEW again AS SELECT * FROM mine")
            spark.table("orders").limit(3).createOrReplaceTempView("orders")

        await world.run(define)
        assert executed(world) == []
        assert (
            await world.run(lambda: spark.sql("SELECT count(*) FROM again").toArrow())
        ).num_rows == 6
        await world.client.insert("orders", [{"id": 100, "name": "x", "n": 1}])
        assert (await world.run(lambda: spark.table("again").distinct().toArrow())).num_rows == 7
        hidden = await world.run(lambda: spark.table("orders").toArrow())
        assert hidden.num_rows == 7  # the stand-in does not limit
        assert executed(world)[-1].root.subquery_alias.input.HasField("limit")
        with pytest.raises(AnalysisException, match="already exists"):
            await world.run(lambda: spark.table("orders").createTempView("mine"))
        assert await world.run(lambda: spark.catalog.dropTempView("mine"))
        await world.run(lambda: spark.sql("DROP VIEW again"))
        # Now the names are Spark's, which has no such tables.
        await world.run(lambda: spark.table("mine").toArrow())
        assert executed(world)[-1].root.read.named_table.unparsed_identifier == "mine"


async def test_a_view_of_sparks_own_hides_an_object(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):
        await world.run(lambda: spark.range(3).createOrReplaceTempView("orders"))
        await world.run(lambda: spark.table("orders").toArrow())
        assert executed(world)[-1].root.read.named_table.unparsed_identifier == "orders"
        rows = await world.run(lambda: spark.table("default.orders").toArrow())
        assert rows.num_rows == 6


async def test_the_catalog_lists_both(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):

        def ask() -> list[Any]:
            catalog = spark.catalog
            return [
                catalog.tableExists("orders"),
                catalog.tableExists("default.sums"),
                catalog.getTable("sums").tableType,
                [(column.name, column.nullable) for column in catalog.listColumns("orders")],
                [table.name for table in catalog.listTables("penstock", "ob*")],
                catalog.isCached("orders"),
            ]

        assert await world.run(ask) == [
            True,
            True,
            "VIEW",
            [("id", False), ("name", True), ("n", True)],
            ["objects"],
            False,
        ]
        assert executed(world) == []


async def test_errors_of_both_sides(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):
        with pytest.raises(AnalysisException, match="it is") as failed:
            await world.run(lambda: spark.sql("SELECT boom"))
        assert failed.value.getCondition() == "BOOM"
        with pytest.raises(AnalysisException, match="its Spark is local"):
            await world.run(lambda: spark.readStream.table("orders").isStreaming)
        with pytest.raises(AnalysisException, match="cannot replace the"):
            await world.run(lambda: spark.range(1).write.saveAsTable("orders", mode="overwrite"))


async def test_plans_and_their_errors_are_counted(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):
        for _ in range(3):
            await world.run(lambda: spark.table("orders").collect())
        with pytest.raises(AnalysisException, match="cannot replace"):
            await world.run(lambda: spark.range(1).write.saveAsTable("orders", mode="overwrite"))
        found: dict[Any, Any] = {
            (each.metric, each.labels): each.value for each in world.service.measures()
        }
        assert sum(found[STATEMENT_SECONDS, ("connect",)].counts) >= 4
        assert found[SESSIONS, ("connect",)] == 1
        errors = {
            labels: count
            for (metric, labels), count in found.items()
            if (metric, labels[:1]) == (STATEMENT_ERRORS, ("connect",))
        }
        assert sum(errors.values()) >= 1, errors


async def test_statements_are_the_services(tmp_path: Path) -> None:
    seen = []

    async def execute(text: str, who: Any, _: Any) -> StatementAnswer | None:
        seen.append(text)
        if text.startswith("SHOW"):
            batch = pa.RecordBatch.from_pydict({"name": ["one", "two"]})
            return StatementAnswer(batch.schema, [batch])
        if text.startswith("CREATE MATERIALIZED"):
            await world.client.create_materialized_view("made", text.partition(" AS ")[2])
            return StatementAnswer(pa.schema([]))
        if text.startswith("BAD"):
            raise QueryRejected("[PARSE_SYNTAX_ERROR] Syntax error at 'BAD'. SQLSTATE: 42601")
        return None

    async with gateway_world(tmp_path, execute_statement=execute) as world:
        await fill(world.client)
        spark = await world.session()
        rows = await world.run(lambda: spark.sql("SHOW TABLES").toArrow())
        assert rows.to_pydict() == {"name": ["one", "two"]}
        view = "CREATE MATERIALIZED VIEW made AS SELECT id FROM orders"
        await world.run(lambda: spark.sql(view))
        assert (await world.run(lambda: spark.table("made").toArrow())).num_rows == 6
        with pytest.raises(PySparkException, match="Syntax error at 'BAD'") as failed:
            await world.run(lambda: spark.sql("BAD"))
        assert type(failed.value).__name__ == "ParseException"
        await world.run(lambda: spark.sql("INSERT INTO spark_table SELECT * FROM orders"))
        assert seen[-1].startswith("INSERT INTO spark_table")
        assert rows_in(executed(world)[-1]).num_rows == 6
        count = len(seen)
        await world.run(lambda: spark.sql("SELECT 1"))
        assert len(seen) == count  # a query is none of them


async def test_frames_are_inserted(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):

        def insert() -> None:
            rows = pa.table({"a": [50, 51], "b": [2.5, 3.5]})
            spark.createDataFrame(rows).write.insertInto("other")
            named = spark.createDataFrame(rows.rename_columns(["id", "x"]))
            named.writeTo("default.other").append()

        await world.run(insert)
        found = await world.client.peek("other")
        assert sorted(found["id"].to_pylist()) == [0, 1, 2, 3, 50, 50, 51, 51]
        with pytest.raises(PySparkException, match="2 columns"):
            await world.run(lambda: spark.range(2).write.insertInto("other"))


async def test_interrupt_reaches_both_sides(tmp_path: Path) -> None:
    begun = anyio.Event()

    async def execute(text: str, who: Any, _: Any) -> StatementAnswer | None:
        begun.set()
        await anyio.sleep_forever()
        return None

    async with gateway_world(tmp_path, execute_statement=execute) as world:
        spark = await world.session()
        failures: list[BaseException] = []

        async def run(call: Any) -> None:
            try:
                await world.run(call)
            except PySparkException as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, lambda: spark.sql("CREATE something"))
            await begun.wait()
            interrupted = await world.run(spark.interruptAll)
        assert len(interrupted) == 1
        assert "OPERATION_CANCELED" in str(failures[0])
        assert len(world.spark.of_kind("InterruptRequest")) == 1


async def test_a_client_that_leaves_cancels_its_call(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        address = world.service.connect_address
        request = base_pb2.ExecutePlanRequest(
            session_id="00112233-4455-6677-8899-aabbccddeeff", operation_id="one"
        )
        request.plan.root.sql.query = "hang"
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream("/spark.connect.SparkConnectService/ExecutePlan")(
                request.SerializeToString()
            )
            await call.read()
            call.cancel()
        while world.service.actors() and "0 operations" not in described(world):
            await anyio.sleep(0.01)
        while not world.spark.interrupted:
            await anyio.sleep(0.01)
        assert world.spark.interrupted == ["one"]


def described(world: GatewayWorld) -> str:
    found = [each for each in world.service.actors() if each.path == "/connect"]
    return str(found[0].doing)


async def test_sessions_and_operations_are_bounded(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, connect_sessions_max=1, connect_operations_max=1) as world:
        spark = await world.session()
        await world.run(lambda: spark.range(1).toArrow())
        other = await world.session()
        with pytest.raises(PySparkException, match="connect_sessions_max"):
            await world.run(lambda: other.range(1).toArrow())
        await world.run(spark.stop)
        await world.run(lambda: other.range(1).toArrow())
        assert len(world.spark.released) == 1


async def test_idle_sessions_are_released(tmp_path: Path) -> None:
    # expires: no session is in use
    async with gateway_world(tmp_path, connect_session_idle_ms=1) as world:
        spark = await world.session()
        await world.run(lambda: spark.range(1).toArrow())
        while not world.spark.released:
            await anyio.sleep(0.05)
        assert world.spark.released == [spark.session_id]


async def test_a_clone_has_the_views(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):
        await world.run(lambda: spark.table("orders").distinct().createOrReplaceTempView("mine"))
        other = await world.run(lambda: spark.cloneSession())
        rows = await world.run(lambda: other.table("mine").toArrow())
        assert rows.num_rows == 6


async def test_the_statement_of_a_source_is_shown(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):
        await world.client.create_source("numbers", {"kind": "counter", "seed": 7})
        shown = await world.run(lambda: spark.sql("SHOW CREATE SOURCE numbers").collect())
        await world.client.drop_source("numbers")
        await world.run(lambda: spark.sql(shown[0][0]).collect())
        (found,) = await world.client.sources()
        assert (found.name, found.kind, found.options) == ("numbers", "counter", b'{"seed":7}')


async def test_no_turn_of_the_loop_is_long_for_a_long_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "INSERT INTO orders VALUES " + ", ".join(f"({n}, 'x', 1)" for n in range(100, 20_100))
    async with filled_world(tmp_path) as (world, spark):
        monkeypatch.setattr("actors.doors.sql_session.offloading.LOOP_CHARACTERS_MAX", 8_192)
        with bounded_turns():
            await world.run(lambda: spark.sql(text).collect())
        assert (await world.client.peek("orders")).num_rows == 20_006


async def test_settings_that_change_the_meaning_of_texts(tmp_path: Path) -> None:
    async with filled_world(tmp_path) as (world, spark):
        await world.run(lambda: spark.conf.set("spark.sql.caseSensitive", "true"))
        await world.run(lambda: spark.table("orders").toArrow())
        assert len(executed(world)) == 1


# -- who may connect -----------------------------------------------------------------------------


async def test_a_token_is_asked_for(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    async with gateway_world(tmp_path, token_file=str(tokens)) as world:
        port = world.service.connect_address.rpartition(":")[2]
        world.service.settings  # noqa: B018 - the client below names the host by its name
        good = await _local_session(world, port, ";token=0123456789abcdef")
        assert (await world.run(lambda: good.range(1).toArrow())).num_rows == 1
        for parameters in ("", ";token=fedcba9876543210"):
            bad = await _local_session(world, port, parameters)
            with pytest.raises(PySparkException, match=r"a token .* is required"):
                await world.run(lambda bad=bad: bad.range(1).toArrow())


async def _local_session(world: GatewayWorld, port: str, parameters: str) -> Any:
    from pyspark.sql.connect.session import SparkSession

    return await world.run(lambda: SparkSession(f"sc://localhost:{port}/{parameters}"))


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    files = {name: tmp_path / name for name in ("ca.pem", "key.pem", "cert.pem")}
    authority.cert_pem.write_to_path(files["ca.pem"])
    issued.private_key_pem.write_to_path(files["key.pem"])
    files["key.pem"].chmod(0o600)
    issued.cert_chain_pems[0].write_to_path(files["cert.pem"])
    async with gateway_world(
        tmp_path,
        tls_certificate=str(files["cert.pem"]),
        tls_key=str(files["key.pem"]),
        tls_authority=str(files["ca.pem"]),
    ) as world:
        credentials = grpc.ssl_channel_credentials(files["ca.pem"].read_bytes())
        request = base_pb2.ConfigRequest(session_id="00112233-4455-6677-8899-aabbccddeeff")
        async with grpc.aio.secure_channel(world.service.connect_address, credentials) as channel:
            call = channel.unary_unary("/spark.connect.SparkConnectService/Config")
            answer = base_pb2.ConfigResponse.FromString(await call(request.SerializeToString()))
        assert answer.session_id == request.session_id


@pytest.mark.parametrize("address", ["0.0.0.0:0", "unix:/tmp/x"])
async def test_an_address_that_others_reach_is_refused(address: str) -> None:
    with pytest.raises(BadSettings, match="connect_listen"):
        await bind_gateway(Settings(connect_listen=address))


async def test_an_address_in_use(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        with pytest.raises(AddressInUse, match="connect_listen"):
            await bind_gateway(Settings(connect_listen=world.service.connect_address))

"""Run every command and snippet of README and docs/, page by page, in order.

The pages use a real service on Spark, which is started once for all of them, in a test folder and
with the settings that the pages name. `House.instead` replaces hosts, ports and folders of a page,
nothing else. A line that starts a service starts one on the in-memory engine, and the rest of its
block uses that one. If the line configures buckets, the block uses the common service. The pages in
`ELSEWHERE` have tests of their own.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doc_house import (  # type: ignore[import-not-found]
    Shell,
    check_synopsis,
    process,
    same_output,
    words_of,
)
from doc_pages import Step, compiled, steps_of  # type: ignore[import-not-found]

from actors import Client, Settings
from actors.durable.persist.attach import StoreLocation, open_as_guest
from actors.durable.persist.catalog_objects import CATALOG, objects_of, shard_of
from actors.durable.persist.split_leases import SplitLeases
from actors.runtime.kernel import SystemClock
from actors.testing.postgres_server import NoPostgres, PostgresServer, postgres_server
from s3_server import KEY_ID, SECRET, serving  # type: ignore[import-not-found]

pytestmark = [pytest.mark.spark, pytest.mark.second]

ROOT: Final = Path(__file__).resolve().parents[3]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE: Final = {
    "spark-source.md": "engine/spark/users_spark.py",
    "testing-an-actor.md": "testing/test_docs_testing_an_actor.py",
    "tutorial.md": "house/docs/test_tutorial.py",
}
LONG_PAGES: Final = ("backups.md", "high-availability.md", "operations.md", "tracing.md")
SKIPPED_MAX: Final = 20
PROSE_CHARACTERS_MAX: Final = 400
NOT_DONE: Final = ("skipped", "drawing", "json")
"""Kinds of steps that are not executed."""
BUCKETS: Final = {
    "PENSTOCK_COPY_BUCKETS": "s3://exports/penstock",
    "PENSTOCK_SINK_BUCKETS": "s3://lake/penstock",
    "PENSTOCK_SOURCE_BUCKETS": "s3://landing",
}
TENANT, TIMELINE = "0a" * 16, "0b" * 16


class House:
    """The servers that all pages use, and what `instead` replaces in their texts."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.bucket = stack.enter_context(serving())
        for bucket in ("exports", "lake", "landing", "bucket"):
            self.bucket.ask("PUT", f"/{bucket}")
        self.postgres: PostgresServer | None = None
        with suppress(NoPostgres):  # then the pages that need PostgreSQL are skipped by name
            self.postgres = stack.enter_context(postgres_server(wal_level="logical"))
        self.environ = {
            **{name: value for name, value in os.environ.items() if name[:9] != "PENSTOCK_"},
            **BUCKETS,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.bucket.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "DB_PASSWORD": "a password",
            "PENSTOCK_SECRET_SHOP": "a password",
            "PENSTOCK_COPY_DIR": str(folder / "copies"),
            "PENSTOCK_SOURCE_DIRS": str(folder),
            "PENSTOCK_SINK_DIR": str(folder),
            "PENSTOCK_LISTEN": "127.0.0.1:0",
            "PENSTOCK_WAL_LISTEN": "127.0.0.1:0",
        }
        arguments = ["serve", "--state-dir", str(self.state), "--trace-file", "all.jsonl"]
        spark = ["--spark-master", "local[2]", "--set", f"spark_conf.{JAVA}={QUICK}"]
        self.address = stack.enter_context(process([*arguments, *spark], self.environ, folder))
        self.acceptors = [
            stack.enter_context(
                process(
                    ["wal", "serve", "--dir", f"wal{n}", "--node-id", str(n)], self.environ, folder
                )
            )
            for n in (1, 2, 3)
        ]
        own = self.acceptors
        self.instead = {
            "127.0.0.1:6874": self.address,
            "a:5454,b:5454,c:5454": ",".join(own),
            "127.0.0.1:5454": own[0],
            "/var/lib/penstock-wal/": f"{folder}/wal1/",
            "--dir /var/lib/penstock-wal --node-id 1": "--dir another --node-id 1",
            "/var/lib/penstock-wal": f"{folder}/wal1",
            "/var/lib/penstock": f"{folder}/another",
            "/data/": f"{folder}/data/",
            "TENANT": TENANT,
            "TIMELINE": TIMELINE,
            "127.0.0.1:9464": "127.0.0.1:0",
            "scale 0.1": "scale 0.001",
            "IP:10.0.0.5": "IP:127.0.0.1",
        }
        if self.postgres is not None:
            port = self.postgres.port
            self.instead |= {
                "postgresql://penstock@db/state?": f"postgresql://bench@127.0.0.1:{port}/postgres?",
                "host 'db.example'": f"host '127.0.0.1', port {port}",
                '"host": "db.example"': f'"host": "127.0.0.1", "port": {port}',
            }

    def placed(self, text: str) -> str:
        """Return a page's text with its addresses and folders replaced by those of this test."""
        for said, stands in self.instead.items():
            text = text.replace(said, stands)
        return text


JAVA, QUICK = "spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with ExitStack() as stack:
        yield House(tmp_path_factory.mktemp("docs"), stack)


class Reader:
    """Follows the instructions of one page."""

    def __init__(self, house: House, shell: Shell, client: Client) -> None:
        self.house = house
        self.shell = shell
        self.client = client
        self.names: dict[str, Any] = {"client": client, "Client": Client, "Settings": Settings}
        self.served = ExitStack()
        self._block = 0

    async def do(self, step: Step) -> bool:
        """Execute one step and compare its output; fails the test if it differs. Returns False if
        there is nothing to execute."""
        text = self.house.placed(step.text)
        if step.block != self._block:
            self._block = step.block
            self.shell.speak_to(self.house.address)
        match step.kind:
            case "synopsis":
                check_synopsis(text)
            case "python":
                printed = await self._python(text, f"line {step.line}")
                promised = step.shown.splitlines()
                assert printed.splitlines()[: len(promised)] == promised
            case "sql":
                self.ask_postgres(text)
            case "command" if " serve" in text:
                await self._serve(text)
            case "command":
                printed = await self._command(text)
                assert not step.shown or same_output(printed, step.shown), printed
            case _:
                return False
        return True

    async def _command(self, text: str) -> str:
        try:
            return str(await anyio.to_thread.run_sync(self.shell.run, text))
        except Exception as error:
            error.add_note(f"of the command {text}")
            raise

    async def _python(self, text: str, name: str) -> str:
        printed = io.StringIO()
        with redirect_stdout(printed):
            if "asyncio.run(" in text:  # a complete program
                await anyio.to_thread.run_sync(exec, compile(text, name, "exec"), {})
            else:
                found = eval(compiled(text, name), self.names)
                if inspect.iscoroutine(found):
                    await found
        return printed.getvalue()

    async def _serve(self, text: str) -> None:
        """Start a service or acceptor with the given settings. It runs until the next one or the
        end."""
        words = words_of(text)
        assert words is not None
        at = words.index("penstock")
        given, words = dict(pair.split("=", 1) for pair in words[:at]), words[at + 1 :]
        if given:
            assert given.items() <= BUCKETS.items(), "the one for all has these settings"
            return
        self.served.close()
        environ = self.house.environ | {"PENSTOCK_STATE_DIR": str(self.shell.folder / "own")}
        if "--listen" in words:
            words[words.index("--listen") + 1] = "127.0.0.1:0"
        opened = process(words, environ, self.shell.folder, in_memory=True)
        address = await anyio.to_thread.run_sync(self.served.enter_context, opened)
        self.house.instead["db.example:6874"] = address
        if words[0] == "serve":
            self.shell.speak_to(address)

    async def clear(self) -> None:
        """Drop everything that a page has created."""
        for sink in await self.client.sinks():
            await self.client.drop_sink(sink.name)
        for source in await self.client.sources():
            if source.health.status != "dropped":
                await self.client.drop_source(source.name)
        for found in reversed((await self.client.status()).objects):
            await self.client.drop(found.name)

    async def make(self, name: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
        """Create a table with rows."""
        await self.client.create_table(name, columns)
        await self.client.insert(name, rows)

    def write(self, name: str, text: str) -> None:
        """Write a file into the test folder."""
        path = self.house.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def ask_postgres(self, *statements: str) -> None:
        """Run statements as the superuser; the final semicolons are optional."""
        server = self.house.postgres
        assert server is not None
        file = server.put("statements.sql", ";\n".join(statements).encode())
        server.run("psql", ["-d", "postgres", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(file)])

    async def run(self, command: str) -> None:
        """Run a command that the page does not show."""
        await anyio.to_thread.run_sync(self.shell.run, command)

    async def push(self) -> None:
        """Create the acceptors' timeline, with one record."""
        record = {"table": "orders", "row": {"id": 1, "customer": "x", "total": "1.50"}}
        (self.shell.folder / "changes.jsonl").write_text(json.dumps(record) + "\n")
        own = ",".join(self.house.acceptors)
        log = f"--tenant {TENANT} --timeline {TIMELINE}"
        await self.run(f"penstock wal push {own} changes.jsonl {log}")


A_ROLE: Final = (
    "DO $$ BEGIN CREATE ROLE penstock LOGIN REPLICATION; EXCEPTION WHEN duplicate_object "
    "THEN NULL; END $$"
)
Presumed = Callable[[Reader, Path], Awaitable[None]]


async def operations(reader: Reader, page: Path) -> None:
    shown = next(step.shown for step in steps_of(page) if step.text == "cat orders.jsonl")
    (reader.shell.folder / "orders.jsonl").write_text(shown + "\n")
    (reader.shell.folder / "penstock.toml").write_text("workers = 1\n")


async def queries(reader: Reader, page: Path) -> None:
    columns = {"id": "bigint", "note": "string"}
    await reader.make("late", columns, [{"id": 1, "note": 'a "b"\n'}, {"id": 2, "note": ""}])
    await reader.client.create_table("late_again", columns)


async def backups(reader: Reader, page: Path) -> None:
    client = reader.client
    await client.create_table("flights", {"id": "bigint", "carrier": "string"}, ["id"])
    await client.create_materialized_view(
        "by_carrier", "SELECT carrier, count(*) AS n FROM flights GROUP BY 1"
    )
    for number in range(4):
        time = await client.insert("flights", [{"id": number, "carrier": "UA"}])
        await client.peek("by_carrier", as_of=time)
    settings, clock = Settings(), SystemClock()
    async with open_as_guest(
        StoreLocation(state_dir=str(reader.house.state)), settings, clock
    ) as attached:
        leases = SplitLeases(attached.consensus, attached.blob, settings, clock)
        shard = shard_of(objects_of(await attached.client.head(CATALOG)), "flights")
        await leases.hold(shard, "audit", time)


async def a_client_with_a_certificate(reader: Reader, page: Path) -> None:
    """Create the client's certificate, which may have any name according to the page."""
    for step in steps_of(page):
        if step.text.startswith(("openssl req -newkey", "openssl x509")):
            await reader.run(re.sub(r"service\.(key|csr|pem)", r"client.\1", step.text))
    await reader.run("cp tokens token && chmod 600 token client.key")


async def sinks(reader: Reader, page: Path) -> None:
    await reader.make("orders", {"a": "bigint", "b": "string"}, [{"a": 1, "b": "x"}])
    folder = reader.shell.folder / "out" / "orders"
    await reader.client.create_sink("files", "orders", "parquet", {"folder": str(folder)})
    while not any(json.loads(path.read_text())["rows"] for path in folder.glob("*/*.json")):
        await anyio.sleep(0.1)


async def sources_files(reader: Reader, page: Path) -> None:
    reader.write("data/clicks/a.json", '{"id": 1}\n')
    reader.write("data/sales/a.csv", "id,amount\n1,2.50\n")
    reader.house.bucket.ask("PUT", "/landing/clicks/a.parquet", parquet_of({"id": [1]}))


async def files_of_a_bucket(reader: Reader, page: Path) -> None:
    await reader.clear()


async def a_table_of_sales(reader: Reader, page: Path) -> None:
    await reader.clear()
    await reader.client.create_table("sales", {"id": "bigint", "amount": "decimal(12,2)"})


async def no_schema(reader: Reader, page: Path) -> None:
    """Drop the schema, which the service started first by the page has created."""
    reader.ask_postgres("DROP SCHEMA penstock CASCADE", A_ROLE)


async def sources_postgres(reader: Reader, page: Path) -> None:
    reader.ask_postgres(
        "DROP SCHEMA IF EXISTS penstock CASCADE",
        "DROP ROLE IF EXISTS penstock",
        "CREATE TABLE accounts (id int primary key)",
        "CREATE TABLE branches (id int primary key)",
        "CREATE TABLE t (code int not null)",
        "CREATE UNIQUE INDEX by_code ON t (code)",
        "SELECT pg_create_logical_replication_slot('penstock_4f1d09c2a7b3', 'pgoutput')",
    )


async def sources_wal(reader: Reader, page: Path) -> None:
    await reader.push()
    _, statement, *_ = (await anyio.Path(page).read_text()).split("```text")
    statement, *_ = statement.split("```")
    (reader.shell.folder / "log.sql").write_text(reader.house.placed(statement))


async def sources(reader: Reader, page: Path) -> None:
    reader.ask_postgres(
        "DROP TABLE IF EXISTS orders, items",
        "CREATE TABLE orders (id int primary key)",
        "CREATE TABLE items (id int primary key)",
        A_ROLE,
        "ALTER TABLE orders OWNER TO penstock",
        "ALTER TABLE items OWNER TO penstock",
        "GRANT CREATE ON DATABASE postgres TO penstock",
    )
    await reader.make("late", {"id": "bigint"}, [{"id": 1}])


async def the_same_by_the_client(reader: Reader, page: Path) -> None:
    await reader.clear()
    shutil.rmtree(reader.house.folder / "data" / "late", ignore_errors=True)
    await reader.make("late", {"id": "bigint"}, [{"id": 1}])


async def wal(reader: Reader, page: Path) -> None:
    await reader.push()
    reader.names |= {"tenant": TENANT, "timeline": TIMELINE}
    reader.names |= {"payload": b'{"table":"orders","row":{"id":2,"customer":"y","total":"2"}}'}


BEFORE: Final[dict[str, dict[str, Presumed]]] = {
    "backups.md": {"": backups},
    "operations.md": {"": operations},
    "persist-stores.md": {"CREATE SCHEMA": no_schema},
    "queries.md": {"": queries},
    "sinks.md": {"": sinks},
    "sources-files.md": {
        "": sources_files,
        "PENSTOCK_SOURCE_BUCKETS": files_of_a_bucket,
        "penstock copy-from": a_table_of_sales,
    },
    "sources-postgres.md": {"": sources_postgres},
    "sources-wal.md": {"": sources_wal},
    "sources.md": {"": sources, "config = {": the_same_by_the_client},
    "tls-and-tokens.md": {"penstock status --connect": a_client_with_a_certificate},
    "wal.md": {"": wal},
}
"""Preparations of each page, by the start of the step before which they run ("": the first)."""
NEED_POSTGRES: Final = ("persist-stores.md", "sources-postgres.md", "sources.md")


def parquet_of(columns: dict[str, list[Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(path, marks=[pytest.mark.long] if path.name in LONG_PAGES else [])
        for path in PAGES
        if path.name not in ELSEWHERE and any(step.kind not in NOT_DONE for step in steps_of(path))
    ],
    ids=lambda path: path.name,
)
async def test_a_page_does_what_it_says(
    page: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in NEED_POSTGRES and house.postgres is None:
        pytest.skip("no PostgreSQL is installed")
    folder = house.folder / page.stem
    folder.mkdir()
    for name, value in house.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(house.state))
    shell = Shell(folder, monkeypatch)
    before = BEFORE.get(page.name, {})
    done = []
    with anyio.fail_after(300):
        async with await Client.connect(house.address) as client:
            reader = Reader(house, shell, client)
            shell.speak_to(house.address)
            await reader.clear()  # left by a page that failed
            with reader.served:
                if "" in before:
                    await before[""](reader, page)
                for step in steps_of(page):
                    for begin, prepare in before.items():
                        if begin and step.text.startswith(begin):
                            await prepare(reader, page)
                    if await reader.do(step):
                        done.append(step.kind)
            await reader.clear()
    assert done == [step.kind for step in steps_of(page) if step.kind not in NOT_DONE]


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    skipped = [step.text for page in PAGES for step in steps_of(page) if step.kind == "skipped"]
    assert len(skipped) <= SKIPPED_MAX, skipped
    assert all(len(why.split()) > 1 for why in skipped)


def test_what_is_run_elsewhere_is_there() -> None:
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text(), (page, test)


def test_targets_and_links_named_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"make ([a-z]+) ", text)) <= targets
    for link in re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", text):
        assert (ROOT / link).exists(), link


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield a page's lines, with their numbers, that are outside fences and tables."""
    fenced = False
    for number, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("|"):
            yield number, line


def test_no_line_of_prose_is_too_long_to_read() -> None:
    """Break a longer line, or turn it into a list."""
    long = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
        for number, line in prose_lines(path.read_text())
        if len(line) > PROSE_CHARACTERS_MAX
    }
    assert long == set()

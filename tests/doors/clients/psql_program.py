"""Print what psql can do: ``psql_program.py PSQL HOST:PORT`` (see `client_probe`)."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from client_probe import ClientProbe, check
from sample_rows import KINDS_ROWS, MANY_ROWS, ORDERS_ROWS, PREPARED, is_null_row, spent_rows


class PsqlRunner:
    """Runs psql against one service."""

    def __init__(self, program: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.command = [program, "-X", "-h", host, "-p", port, "-U", "tester", "-d", "penstock"]

    def lines(self, script: str, *options: str) -> list[str]:
        """Return what a script prints, unaligned. Raises `RuntimeError` with its error output."""
        done = self.run(script, "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", *options)
        if done.returncode or done.stderr:
            raise RuntimeError(done.stderr)
        return done.stdout.splitlines()

    def run(self, script: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a script through stdin."""
        command = [*self.command, *options]
        return subprocess.run(command, input=script, capture_output=True, text=True, check=False)


def main(program: str, address: str) -> None:
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    probe = ClientProbe("psql", told.stdout.split()[2])
    psql = PsqlRunner(program, address)
    probe.lacks("binary", "it requests only text")
    for tried in TRIED:
        with probe.tries(tried.__name__):
            tried(psql)


def connect(psql: PsqlRunner) -> None:
    check(psql.lines("SHOW server_version;"), ["15.0 (Penstock)"])
    check(psql.lines("\\echo :SERVER_VERSION_NUM"), ["150000"])
    check('database "penstock"' in psql.lines("\\conninfo")[0], True)


def reflection(psql: PsqlRunner) -> None:
    tables = psql.lines("\\dt")
    check({line.split("|")[1] for line in tables} >= {"kinds", "orders", "many"}, True)
    check([line.split("|")[1] for line in psql.lines("\\dm")], ["spent"])
    check("by_customer" in {line.split("|")[1] for line in psql.lines("\\di")}, True)
    told = psql.run("\\d orders").stdout
    for part in ("customer", "numeric(12,2)", "PRIMARY KEY", "by_customer"):
        check(part if part in told else told, part)
    told = psql.run("\\d+ spent").stdout
    check("GROUP BY customer" if "GROUP BY customer" in told else told, "GROUP BY customer")
    check(any("penstock" in line for line in psql.lines("\\l")), True)


def text(psql: PsqlRunner) -> None:
    wanted = (
        "17|t|17|17|-51|17000000000000|17.5|2.125|17.125|text 17 ü, 'quoted'|s17|c17   |\\x1100ff"
        "|2000-01-18|2026-01-01 00:00:17.000001+00|2026-01-01 00:00:17.000001"
        '|{17,NULL,18}|{a,"b\\"c"}|{"k":17}|{"a":17,"b":0.5}'
    )
    check(psql.lines("SELECT * FROM kinds WHERE id = 17;"), [wanted])
    check(len(psql.lines("SELECT * FROM kinds;")), KINDS_ROWS)


def nulls(psql: PsqlRunner) -> None:
    found = psql.lines("\\pset null -\nSELECT * FROM kinds WHERE flag IS NULL;")
    check(len(found), sum(map(is_null_row, range(KINDS_ROWS))))
    check({value for line in found for value in line.split("|")[1:]}, {"-"})


def parameters(psql: PsqlRunner) -> None:
    script = "\\set wanted 'customer 3'\nSELECT count(*) FROM orders WHERE customer = :'wanted';"
    check(psql.lines(script), ["100"])


def prepared(psql: PsqlRunner) -> None:
    executes = "".join(f"EXECUTE one({number});\n" for number in range(PREPARED))
    found = psql.lines(
        f"PREPARE one(bigint) AS SELECT id FROM orders WHERE id = $1;\n{executes}DEALLOCATE one;"
    )
    check(found, [str(number) for number in range(PREPARED)])


def batch(psql: PsqlRunner) -> None:
    rows = ", ".join(f"({number}, 'w')" for number in range(500))
    psql.lines(f"CREATE TABLE batches (id bigint, w text); INSERT INTO batches VALUES {rows};")
    check(psql.lines("SELECT count(*) FROM batches;"), ["500"])


def transaction(psql: PsqlRunner) -> None:
    script = """
        CREATE TABLE accounts (id bigint PRIMARY KEY, n bigint);
        BEGIN; INSERT INTO accounts VALUES (1, 1); COMMIT;
        BEGIN; UPDATE accounts SET n = 10; ROLLBACK;
        SELECT n FROM accounts;"""
    check(psql.lines(script), ["1"])


def savepoint(psql: PsqlRunner) -> None:
    script = """
        CREATE TABLE saved (id bigint PRIMARY KEY);
        \\set ON_ERROR_ROLLBACK on
        \\set ON_ERROR_STOP off
        BEGIN;
        INSERT INTO saved VALUES (1);
        INSERT INTO saved VALUES (1);
        SAVEPOINT here;
        INSERT INTO saved VALUES (2);
        ROLLBACK TO here;
        INSERT INTO saved VALUES (3);
        COMMIT;
        SELECT id FROM saved ORDER BY id;"""
    check(psql.run(script, "-A", "-t", "-q").stdout.split(), ["1", "3"])


def fetching(psql: PsqlRunner) -> None:
    found = psql.lines("\\set FETCH_COUNT 500\nSELECT id FROM orders ORDER BY id;")
    check(found, [str(number) for number in range(ORDERS_ROWS)])


def copy_in(psql: PsqlRunner) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        path.write_text("id,word\n" + "".join(f'{n},"a,{n}"\n' for n in range(2_000)))
        psql.lines(f"""
            CREATE TABLE copied (id bigint, word text);
            \\copy copied FROM '{path}' WITH (FORMAT csv, HEADER)
            COPY copied FROM STDIN;\n3000\tx\\ty\n\\.\n""")
    found = psql.lines(
        "SELECT count(*), max(id) FROM copied; SELECT word FROM copied WHERE id = 7;"
    )
    check(found, ["2001|3000", "a,7"])


def copy_out(psql: PsqlRunner) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        wanted = "(SELECT id, customer FROM orders)"
        psql.lines(f"\\copy {wanted} TO '{path}' WITH (FORMAT csv, HEADER)")
        check(len(path.read_text().splitlines()), ORDERS_ROWS + 1)
    check(len(psql.lines("COPY orders TO STDOUT;")), ORDERS_ROWS)


def cancel(psql: PsqlRunner) -> None:
    # More than a pipe holds, so that the rows are seen as they come; then it waits for changes.
    command = [*psql.command, "-c", "COPY (SUBSCRIBE many) TO STDOUT"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate()
    check("canceling statement due to user request" in complaint or complaint, True)


def error(psql: PsqlRunner) -> None:
    told = psql.run("\\set VERBOSITY verbose\nCREATE TABLE x (a int,);").stderr
    check("ERROR:  42601" in told or told, True)
    check("LINE 1: CREATE TABLE x (a int,);" in told or told, True)
    marked = told.splitlines()[2]
    check(marked.index("^") - len("LINE 1: "), 22)


def view(psql: PsqlRunner) -> None:
    psql.lines("""
        CREATE TABLE words (word text);
        CREATE MATERIALIZED VIEW lengths AS
            SELECT word, count(*) AS n FROM words GROUP BY word;""")
    found = psql.lines("SELECT * FROM spent ORDER BY customer;")
    check(found, [f"{name}|{n}|{total:.2f}" for name, n, total in spent_rows()])


def fresh(psql: PsqlRunner) -> None:
    step = "INSERT INTO words VALUES ('one');\nSELECT n FROM lengths WHERE word = 'one';\n"
    check(psql.lines(step * 5), ["1", "2", "3", "4", "5"])


def subscribe(psql: PsqlRunner) -> None:
    found = psql.lines("""
        BEGIN;
        DECLARE changes CURSOR FOR SUBSCRIBE lengths;
        FETCH 10 changes;
        COMMIT;""")
    check([line.split("|")[1:] for line in found], [["1", "one", "5"]])


def large(psql: PsqlRunner) -> None:
    found = psql.lines("SELECT id FROM many;")
    check(sum(map(int, found)), MANY_ROWS * (MANY_ROWS - 1) // 2)


TRIED = (
    *(connect, reflection, text, nulls, parameters, prepared, batch, transaction, savepoint),
    *(fetching, copy_in, copy_out, cancel, error, view, fresh, subscribe, large),
)

if __name__ == "__main__":
    main(*sys.argv[1:])

"""Plain views, OR REPLACE, ALTER and COMMENT through both doors, on real Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import PySparkException
from two_doors import TwoDoors, two_doors  # type: ignore[import-not-found]

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoDoors]:
    with two_doors(tmp_path_factory.mktemp("definitions")) as made:
        yield made


def test_plain_views_are_inlined_where_they_are_named(doors: TwoDoors) -> None:
    doors.run("CREATE TABLE goods (id BIGINT, kind STRING, price INT, PRIMARY KEY (id))")
    doors.run("INSERT INTO goods VALUES (1, 'a', 5), (2, 'b', 50), (3, 'a', 70), (4, NULL, 90)")
    doors.run("CREATE VIEW dear AS SELECT * FROM goods WHERE price > 10 -- all that cost")
    doors.run("CREATE VIEW dear_kinds AS SELECT kind, count(*) AS n FROM dear GROUP BY kind")
    assert doors.alike("SELECT n FROM dear_kinds d WHERE kind IS NOT NULL ORDER BY kind") == [
        (1,),
        (1,),
    ]
    both = "WITH w AS (SELECT id FROM dear) SELECT count(*) FROM w JOIN public_goods USING (id)"
    doors.run("CREATE VIEW public_goods AS SELECT id FROM goods")
    assert doors.alike(both) == [(3,)]
    # A name that the query defines itself goes first.
    assert doors.alike("WITH dear AS (SELECT 7 AS seven) SELECT * FROM dear") == [(7,)]
    doors.run("CREATE MATERIALIZED VIEW sums AS SELECT kind, sum(price) AS s FROM dear GROUP BY 1")
    doors.run("INSERT INTO goods VALUES (5, 'b', 30), (6, 'b', 1)")
    assert doors.alike("SELECT s FROM sums WHERE kind = 'b'") == [(80,)]
    doors.refused("CREATE OR REPLACE VIEW dear AS SELECT * FROM goods", match="sums")
    doors.refused("CREATE OR REPLACE VIEW dear AS SELECT id FROM goods", match="dear_kinds")
    doors.refused("DROP TABLE goods", match="used by")
    doors.refused("CREATE VIEW loop AS SELECT * FROM loop", match="loop")
    frame = doors.spark.table("dear_kinds").where("n > 0").count()
    assert frame == 3
    assert "dear" in {each.name for each in doors.spark.catalog.listTables()}
    with doors.pg.transaction():
        # A view's query sees the transaction's own changes.
        doors.run("DELETE FROM goods WHERE id = 3")
        seen = doors.pg.execute("SELECT count(*) FROM dear").fetchone()
        assert seen == (3,)
    doors.spark.sql("CREATE OR REPLACE VIEW dear_kinds AS SELECT DISTINCT kind FROM dear").collect()
    assert doors.alike("SELECT count(*) FROM dear_kinds") == [(2,)]
    doors.run("DROP TABLE goods CASCADE")
    doors.refused("SELECT * FROM dear", match="dear")


def test_a_replacement_that_fails_leaves_the_old_view(doors: TwoDoors) -> None:
    doors.run("CREATE TABLE parts (id BIGINT, size INT)")
    doors.run("INSERT INTO parts VALUES (1, 5), (2, 0), (3, 7)")
    doors.run("CREATE MATERIALIZED VIEW doubled AS SELECT id, 2 * size AS d FROM parts")
    assert doors.alike("SELECT sum(d) FROM doubled") == [(24,)]
    failing = "CREATE OR REPLACE MATERIALIZED VIEW doubled AS SELECT id, CAST({0} AS INT) AS d {1}"
    doors.refused(failing.format("10 / size", "FROM parts"), match="stays as it is")
    doors.run("INSERT INTO parts VALUES (4, 1)")
    assert doors.alike("SELECT sum(d) FROM doubled") == [(26,)]
    doors.run("DELETE FROM parts WHERE size = 0")
    doors.run(failing.format("70 / size", "FROM parts"))
    assert doors.alike("SELECT sum(d) FROM doubled") == [(94,)]
    doors.run("INSERT INTO parts VALUES (5, 10)")
    assert doors.alike("SELECT sum(d) FROM doubled") == [(101,)]
    doors.run("ALTER MATERIALIZED VIEW doubled SET REFRESH POLICY FULL")
    doors.run("INSERT INTO parts VALUES (6, 70)")
    assert doors.alike("SELECT sum(d) FROM doubled") == [(102,)]
    doors.run("ALTER MATERIALIZED VIEW doubled RENAME TO divided")
    doors.run("COMMENT ON COLUMN divided.d IS 'seventy by size'")
    described = doors.pg.execute("DESCRIBE divided").fetchall()
    assert ("d", "int", "seventy by size") in described
    text = "SELECT col_description('divided'::regclass, 2)"
    assert doors.pg.execute(text.encode()).fetchone() == ("seventy by size",)
    with pytest.raises(PySparkException, match="divided"):
        doors.spark.sql("DROP TABLE parts").collect()
    doors.spark.sql("DROP TABLE parts CASCADE").collect()


def test_a_query_may_have_columns_of_one_name(doors: TwoDoors) -> None:
    doors.run("CREATE TABLE sides (id BIGINT, a INT, b INT)")
    doors.run("INSERT INTO sides VALUES (1, 2, 3), (4, 5, 6)")
    assert doors.alike("SELECT a, b AS a, a AS A FROM sides") == [(2, 3, 2), (5, 6, 5)]
    joined = "SELECT * FROM sides s JOIN sides t ON s.id = t.id ORDER BY s.id DESC -- both"
    assert doors.alike(joined) == [(1, 2, 3, 1, 2, 3), (4, 5, 6, 4, 5, 6)]
    found = doors.pg.execute(joined.encode(), prepare=True)
    assert [column.name for column in found.description or ()] == ["id", "a", "b"] * 2
    assert [row[0] for row in found] == [4, 1], "the order is the query's own"
    doors.refused("CREATE TABLE twice AS SELECT a, a FROM sides", match="duplicate column")
    doors.run("DROP TABLE sides")


def test_a_query_is_inserted_as_spark_assigns_its_values(doors: TwoDoors) -> None:
    doors.run("CREATE TABLE priced (id INT, price DECIMAL(6, 2), name TEXT, day DATE)")
    doors.run(
        "INSERT INTO priced SELECT id, CAST(id AS DECIMAL(6, 2)) / 8, 'n', NULL FROM range(4)"
    )
    assert doors.alike("SELECT id, CAST(price AS DOUBLE) FROM priced") == [
        (0, 0.0),
        (1, 0.13),
        (2, 0.25),
        (3, 0.38),
    ]
    doors.run("TRUNCATE priced")
    doors.run("INSERT INTO priced SELECT 7.9, 2.675e0, 15, TIMESTAMP '2024-02-03 04:05:06'")
    doors.spark.sql("INSERT INTO priced SELECT 8, 9.995, 'x', DATE '2024-02-04'").collect()
    shown = doors.alike("SELECT id, CAST(price AS STRING), name, CAST(day AS STRING) FROM priced")
    assert shown == [(7, "2.68", "15", "2024-02-03"), (8, "10.00", "x", "2024-02-04")]
    doors.refused("INSERT INTO priced SELECT 1, 99999.999, 'x', NULL", match="price")
    doors.refused("INSERT INTO priced SELECT 1, 1e9, 'x', NULL", match="(?i)overflow|represented")
    doors.spark.sql("TRUNCATE TABLE priced").collect()
    assert doors.alike("SELECT count(*) FROM priced") == [(0,)]
    doors.run("DROP TABLE priced")


def test_relations_about_the_service_are_grouped_and_joined(doors: TwoDoors) -> None:
    doors.run("CREATE TABLE watched (id BIGINT, note STRING)")
    doors.run("CREATE TABLE watcher (id BIGINT)")
    doors.run("INSERT INTO watched VALUES (1, 'watched'), (2, 'watcher'), (3, 'nobody')")
    grouped = "SELECT kind, count(*) FROM penstock.objects WHERE name LIKE 'watch%' GROUP BY kind"
    assert doors.alike(grouped) == [("table", 2)]
    joined = (
        "WITH o AS (SELECT name, kind FROM penstock.objects) "
        "SELECT w.id, o.kind FROM watched w LEFT JOIN o ON o.name = w.note"
    )
    assert doors.alike(f"SELECT id FROM ({joined}) WHERE kind IS NULL") == [(3,)]
    doors.refused("SELECT nothing FROM penstock.objects", match="nothing")
    assert doors.alike("SELECT count(*) FROM penstock.steps s WHERE s.name = 'watched'") == [(0,)]
    doors.run("DROP TABLE watched")
    doors.run("DROP TABLE watcher")


def test_upserts_of_every_form(doors: TwoDoors) -> None:
    doors.run("CREATE TABLE stock (shop STRING, id BIGINT, n INT, at DATE, PRIMARY KEY (shop, id))")
    given = "INSERT INTO stock (shop, id, n) VALUES ('a', 1, 5), ('b', 1, 7)"
    doors.run(given)
    doors.refused(given, match="already exists")
    doors.run(f"{given} ON CONFLICT DO NOTHING")
    made = doors.pg.execute(f"{given} ON CONFLICT (id, shop) DO UPDATE SET n = EXCLUDED.n".encode())
    assert made.statusmessage == "INSERT 0 2"
    add = "ON CONFLICT (shop, id) DO UPDATE SET n = stock.n + excluded.n, at = DATE '2024-01-02'"
    doors.run(f"INSERT INTO stock VALUES ('a', 1, 10, NULL), ('c', 2, 3, DEFAULT) {add}")
    of_query = "INSERT INTO stock AS s SELECT shop, id + 1, 1, at FROM stock WHERE shop <> 'c'"
    doors.run(f"{of_query} {add.replace('stock.n', 's.n')}")
    doors.run(f"INSERT INTO stock VALUES ('c', 2, 100, NULL) {add} WHERE stock.n > 50")
    text = "INSERT INTO stock (shop, id, n) VALUES (%s, %s, %s) ON CONFLICT (shop, id)"
    text += " DO UPDATE SET n = EXCLUDED.n"
    doors.pg.execute(text.encode(), ("d", 4, 8), prepare=True)
    doors.pg.execute(text.encode(), ("d", 4, 9), prepare=True)
    assert doors.alike("SELECT shop, id, n, CAST(at AS STRING) FROM stock") == [
        ("a", 1, 15, "2024-01-02"),
        ("a", 2, 1, "2024-01-02"),
        ("b", 1, 7, None),
        ("b", 2, 1, None),
        ("c", 2, 3, None),
        ("d", 4, 9, None),
    ]
    doors.refused(
        "INSERT INTO stock VALUES ('a', 1, 1, NULL) ON CONFLICT (id) DO NOTHING", match="KEY"
    )
    doors.run(
        "CREATE MATERIALIZED VIEW stocked AS SELECT shop, sum(n) AS n FROM stock GROUP BY shop"
    )
    doors.run("REFRESH MATERIALIZED VIEW CONCURRENTLY stocked")
    doors.refused("REFRESH MATERIALIZED VIEW stock", match="only a materialized view")
    doors.run("CREATE INDEX CONCURRENTLY IF NOT EXISTS stocked_shop ON stocked USING btree (shop)")
    doors.run("VACUUM (ANALYZE) stock")
    doors.run("DROP TABLE stock CASCADE")


def test_a_table_is_given_columns_while_views_read_it(doors: TwoDoors) -> None:
    doors.run("CREATE TABLE boxes (id BIGINT, size INT, PRIMARY KEY (id))")
    doors.run("INSERT INTO boxes SELECT id, id % 7 FROM range(20000) AS r (id)")
    doors.run(
        "CREATE MATERIALIZED VIEW by_size AS SELECT size, count(*) AS n FROM boxes GROUP BY 1"
    )
    doors.run("CREATE MATERIALIZED VIEW wide AS SELECT * FROM boxes WHERE size > 5")
    doors.run("CREATE INDEX boxes_size ON boxes (size)")
    assert doors.alike("SELECT n FROM by_size WHERE size = 6") == [(2857,)]
    doors.run("ALTER TABLE boxes ADD COLUMN colour TEXT, ADD COLUMN weight NUMERIC(9, 2)")
    doors.run("ALTER TABLE boxes ADD COLUMN IF NOT EXISTS colour TEXT")
    doors.refused("ALTER TABLE boxes ADD COLUMN colour TEXT", match="already")
    doors.run("UPDATE boxes SET colour = 'red' WHERE id = 6")
    doors.run("INSERT INTO boxes VALUES (20000, 6, 'blue', 1.5)")
    doors.spark.sql("INSERT INTO boxes (id, size) VALUES (20001, 6)").collect()
    coloured = "SELECT id, colour, CAST(weight AS DOUBLE) FROM boxes WHERE size = 6 AND colour > ''"
    assert doors.alike(coloured) == [(6, "red", None), (20000, "blue", 1.5)]
    assert doors.alike("SELECT count(*), count(colour) FROM boxes") == [(20002, 2)]
    assert doors.alike("SELECT n FROM by_size WHERE size = 6") == [(2859,)]
    assert [name for name, *_ in doors.pg.execute("DESCRIBE wide").fetchall()] == ["id", "size"]
    assert doors.alike("SELECT count(*) FROM wide") == [(2859,)]
    doors.run("CREATE OR REPLACE MATERIALIZED VIEW wide AS SELECT * FROM boxes WHERE size > 5")
    doors.run("DELETE FROM boxes WHERE id = 20000")
    doors.run("DROP TABLE boxes CASCADE")


def test_a_plain_view_is_followed_as_its_query(doors: TwoDoors) -> None:
    doors.run("CREATE TABLE lots (id BIGINT, size INT)")
    doors.run("CREATE VIEW large AS SELECT id, size FROM lots WHERE size > 10")
    doors.run("INSERT INTO lots VALUES (1, 5), (2, 50)")
    with doors.pg.cursor() as cursor, doors.pg.transaction():
        cursor.execute("DECLARE c CURSOR FOR SUBSCRIBE large")
        found: list[tuple[Any, ...]] = []
        while not found:
            cursor.execute("FETCH 10 c")
            found += [row[1:] for row in cursor.fetchall()]
        assert found == [(1, 2, 50)]
    doors.run("DROP TABLE lots CASCADE")

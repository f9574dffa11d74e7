"""What PostgreSQL makes of a text, and what is made of it here, where both answer: a table of the
page. Of the standard library alone."""

from __future__ import annotations

from typing import Final, NamedTuple


class SqlDifference(NamedTuple):
    """One text, with what both make of it as psql shows it. Rows are divided by semicolons."""

    text: str
    """What stands behind SELECT."""
    postgres: str
    here: str


ERROR: Final = "an error"

DIFFERENCES: Final = (
    SqlDifference("7 / 2", "3", "3.5"),
    SqlDifference("-7 / 2", "-3", "-3.5"),
    SqlDifference("1.0 / 3", "0.33333333333333333333", "0.333333"),
    SqlDifference("2 ^ 3", "8", "1"),
    SqlDifference("2.5::int", "3", "2"),
    SqlDifference("(-2.5)::int", "-3", "-2"),
    SqlDifference("3.5::int", "4", "3"),
    SqlDifference("-1.5::float8::int", "-2", "-1"),
    SqlDifference("round(2.5::float8)", "2", "3"),
    SqlDifference("log(100)", "2", "4.605170185988092"),
    SqlDifference("concat('a', NULL, 'b')", "ab", "NULL"),
    SqlDifference("upper('straße')", "STRAßE", "STRASSE"),
    SqlDifference("initcap('o''brien-smith x')", "O'Brien-Smith X", "O'brien-smith X"),
    SqlDifference("substring('abcdef', 0, 3)", "ab", "abc"),
    SqlDifference("substring('abcdef', -2)", "abcdef", "ef"),
    SqlDifference("substr('abcdef', -2, 4)", "a", "ef"),
    SqlDifference("left('abc', -1)", "ab", ""),
    SqlDifference("right('abc', -1)", "bc", ""),
    SqlDifference("ltrim('xxa', 'x')", "a", ""),
    SqlDifference("rtrim('axx', 'x')", "a", ""),
    SqlDifference("regexp_replace('aXbX', 'X', '-')", "a-bX", "a-b-"),
    SqlDifference("regexp_replace('ab', '(a)(b)', '\\2\\1')", "ba", "21"),
    SqlDifference("DATE '2024-03-03' - DATE '2024-02-01'", "31", "31 days"),
    SqlDifference("DATE '2024-01-31' + INTERVAL '1 month'", "2024-02-29 00:00:00", "2024-02-29"),
    SqlDifference("DATE '2024-01-31' + INTERVAL '1 day'", "2024-02-01 00:00:00", "2024-02-01"),
    SqlDifference("INTERVAL '36 hours'", "36:00:00", "1 day 12:00:00"),
    SqlDifference("extract(dow from DATE '2024-03-03')", "0", "1"),
    SqlDifference("date_part('dow', DATE '2024-03-03')", "0", "1"),
    SqlDifference(
        "date_trunc('month', TIMESTAMP '2024-03-03 10:30:00')",
        "2024-03-01 00:00:00",
        "2024-03-01 00:00:00+00",
    ),
    SqlDifference(
        "date_trunc('week', TIMESTAMP '2024-03-03 10:30:00')",
        "2024-02-26 00:00:00",
        "2024-02-26 00:00:00+00",
    ),
    SqlDifference(
        "date_trunc('quarter', TIMESTAMP '2024-03-03 10:30:00')",
        "2024-01-01 00:00:00",
        "2024-01-01 00:00:00+00",
    ),
    SqlDifference("to_char(DATE '2024-03-03', 'DD')", "03", "63"),
    SqlDifference("to_char(1234.5, '9,999.99')", " 1,234.50", "1,234.50"),
    SqlDifference("array_position(ARRAY[1, 2], 9)", "NULL", "0"),
    SqlDifference("array_agg(n) FROM (VALUES (2), (NULL), (1)) AS v (n)", "{2,NULL,1}", "{2,1}"),
    SqlDifference("array_agg(n) FROM (SELECT 1 AS n WHERE false) AS v", "NULL", "{}"),
    SqlDifference(
        "n FROM (VALUES (1), (NULL), (2)) AS v (n) ORDER BY n", "1; 2; NULL", "NULL; 1; 2"
    ),
    SqlDifference(
        "n FROM (VALUES (1), (NULL), (2)) AS v (n) ORDER BY n DESC", "NULL; 2; 1", "2; 1; NULL"
    ),
    SqlDifference(
        "n, row_number() OVER (ORDER BY n) FROM (VALUES (1), (NULL), (2)) AS v (n) ORDER BY 2",
        "1, 1; 2, 2; NULL, 3",
        "NULL, 1; 1, 2; 2, 3",
    ),
    SqlDifference(
        "n, rank() OVER (ORDER BY n DESC) FROM (VALUES (1), (NULL), (2)) AS v (n) ORDER BY 2",
        "NULL, 1; 2, 2; 1, 3",
        "2, 1; 1, 2; NULL, 3",
    ),
    SqlDifference(
        "n, first_value(n) OVER (ORDER BY n) FROM (VALUES (1), (NULL)) AS v (n) ORDER BY 1 NULLS LAST",
        "1, 1; NULL, 1",
        "1, NULL; NULL, NULL",
    ),
    SqlDifference("count(*) FROM (SELECT 1 AS a WHERE false) AS v GROUP BY ROLLUP (a)", "0", ""),
    SqlDifference("x FROM unnest(ARRAY[1, NULL, 2]) AS x ORDER BY x", "1; 2; NULL", "NULL; 1; 2"),
    SqlDifference("avg(s) FROM (VALUES ('1'), ('2')) AS v (s)", ERROR, "1.5"),
    SqlDifference("sum(s) FROM (VALUES ('1'), ('2')) AS v (s)", ERROR, "3"),
    SqlDifference("DATE '2024-03-03' > '2024'", ERROR, "t"),
    SqlDifference("CAST('2024' AS date)", ERROR, "2024-01-01"),
    SqlDifference("sqrt(-1::float8)", ERROR, "NaN"),
    SqlDifference("ln(0::float8)", ERROR, "NULL"),
    SqlDifference("current_date - current_date", "0", "00:00:00"),
    SqlDifference("X'1F'", "00011111", "\\x1f"),
    SqlDifference("sum(0.1::real) FROM (VALUES (1)) AS v (n)", "0.1", "0.10000000149011612"),
)

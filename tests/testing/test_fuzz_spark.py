"""The grammar of made-up views on Spark: broad, the same from a seed, without a free choice."""

from __future__ import annotations

import re
from random import Random

from actors.testing.view_scripts import parse_script
from tests.kit.fuzz import make_case
from tests.kit.fuzz_names import with_odd_names
from tests.kit.fuzz_spark import SparkWriter

WORDS = (
    "row_number()", "rank() over", "dense_rank()", "ntile(", "lag(", "lead(", "ignore nulls",
    "first_value(", "nth_value(", "rows between", "range between", "nulls last", "<= 2",
    "rollup(", "cube(", "grouping sets", "grouping_id()", "cast(grouping(", " intersect ",
    " except ", "lateral view explode(", "lateral view outer", "posexplode(", "inline(", "stack(",
    "filter(array", "sequence(", " limit ", " offset ", "select window.start", "10 minutes",
    "'1 hour'", "(select max(", "(select count(*)", ") is null)", "count(distinct r1.k, ",
    "sum(distinct", "cte2", " < r", " not in (select", "or not exists", "explode(array",
)  # fmt: skip


def texts(seed: int, count: int) -> list[str]:
    cases = [make_case(seed, number, 4, SparkWriter) for number in range(count)]
    return [sql for case in cases for _, sql in case.views]


def test_a_script_is_the_same_every_time_and_reads_back() -> None:
    for number in range(30):
        case = make_case(3, number, 4, SparkWriter)
        assert case == make_case(3, number, 4, SparkWriter)
        for each in (case, with_odd_names(case, Random("3"))):
            script = parse_script(each.text())
            assert len(script.views) == 4
            assert script.determined
            assert len(script.changes) == len(case.changes)


def test_every_construct_occurs() -> None:
    made = texts(5, 400)
    missing = [word for word in WORDS if not any(word in text for text in made)]
    assert missing == []


def test_no_text_leaves_a_choice() -> None:
    """What stands before a LIMIT, and what a function of places reads, is ordered."""
    for text in texts(6, 200):
        for found in re.finditer(r" limit \d| offset \d", text):
            assert " order by " in text[: found.start()]
        for found in re.finditer(r"(row_number\(\)|ntile\(2\)|(?:lag|lead)\([^()]*\))", text):
            over = re.match(r"(?: ignore nulls)? over \([^()]*order by", text[found.end() :])
            assert over, text


def test_the_grammar_for_other_engines_stays_without_them() -> None:
    cases = [make_case(5, number) for number in range(100)]
    for text in (sql for case in cases for _, sql in case.views):
        assert not re.search(r" over \(| rollup\(| intersect |lateral view| limit ", text)
    assert not any(c.type == "timestamp" for case in cases for t in case.tables for c in t.columns)

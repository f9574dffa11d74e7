"""PostgreSQL's dialect as Spark's: the text, and the way back to positions as written."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from actors.doors.sql_session.time_literals import TimeLiterals
from actors.doors.sql_session.typed_literals import typed_literal
from actors.engine.sql import dialects
from actors.engine.sql.dialects import SparkText
from actors.engine.sql.tokens import SqlDialect, lex_sql, lex_text, name_value, text_value
from actors.engine.sql.type_names import WrittenType
from actors.runtime.errors import SqlSyntaxError


def to_spark(text: str, *given: Any, **more: Any) -> SparkText:
    return dialects.to_spark(lex_text(text, SqlDialect.POSTGRES), *given, **more)


POSTGRES = SqlDialect.POSTGRES

CASES: list[tuple[str, str]] = [
    ("", ""),
    ("SELECT a, 'b', 1.5 FROM t -- x", "SELECT a, 'b', 1.5 FROM t "),
    ('SELECT "A b", "c""d", "e`f"', 'SELECT `A b`, `c"d`, `e``f`'),
    ("SELECT `a`", "SELECT `a`"),
    (r"SELECT 'a\nb'", r"SELECT 'a\\nb'"),
    ("SELECT 'it''s'", r"SELECT 'it\'s'"),
    (r"SELECT E'it\'s\\'", r"SELECT 'it\'s\\'"),
    (r"SELECT E'\x41'", "SELECT 'A'"),
    ("SELECT $$it's \\ $$", r"SELECT 'it\'s \\ '"),
    ("SELECT $q$$$$q$", "SELECT '$$'"),
    ("SELECT 'a'$$b$$", "SELECT 'a' 'b'"),
    ("SELECT a::int8, b::text::varchar(3)", "SELECT a::bigint, left(b::string::string, 3)"),
    ("SELECT '1'::double precision + 1", "SELECT '1'::double + 1"),
    ("SELECT a::numeric(10, 2), b::numeric", "SELECT a::decimal(10,2), b::decimal(38,18)"),
    ("SELECT a::timestamp(6) with time zone", "SELECT a::timestamp"),
    ("SELECT a::timestamp without time zone", "SELECT a::timestamp_ntz"),
    ("SELECT a::int4[]", "SELECT a::array<int>"),
    ("SELECT a::pg_catalog.int4", "SELECT a::int"),
    ('SELECT a::"pg_catalog"."int4"', "SELECT a::int"),
    ("SELECT a::DATE, b::regclass", "SELECT a::DATE, b::regclass"),
    ("SELECT a::float8::interval", "SELECT a::double::interval"),
    ("SELECT CAST(a AS int8)", "SELECT CAST(a AS bigint)"),
    (
        "SELECT CAST(CAST(a AS text) || (SELECT b AS text) AS float8)",
        "SELECT CAST(CAST(a AS string) || (SELECT b AS text) AS double)",
    ),
    ("SELECT a AS text, int8 FROM text", "SELECT a AS text, int8 FROM text"),
    ("SELECT timestamp '2024-01-01'", "SELECT timestamp_ntz '2024-01-01'"),
    ("SELECT TIMESTAMP WITH TIME ZONE '2024-01-01'", "SELECT timestamp '2024-01-01'"),
    ("SELECT timestamp, timestamp(a) FROM t", "SELECT timestamp, timestamp(a) FROM t"),
    ("SELECT date '2024-01-01', interval '1 day'", "SELECT date '2024-01-01', interval '1 day'"),
    ("SELECT pg_catalog.upper(a)", "SELECT upper(a)"),
    ('SELECT public.t.a FROM public.t, "public"."T"', "SELECT t.a FROM t, `T`"),
    ("SELECT x.public.a, public FROM public", "SELECT x.public.a, public FROM public"),
    ("SELECT * FROM pg_catalog.pg_class", "SELECT * FROM pg_catalog.pg_class"),
    ("SELECT a ILIKE 'B%'", "SELECT a ILIKE 'B%'"),
    ("SELECT current_schema", "SELECT current_schema"),
    ("SELECT 1 /* a /* b */ c */+ 2", "SELECT 1 + 2"),
    ("SELECT 1--x\n+ 2", "SELECT 1\n+ 2"),
    ("SELECT 1 --x\\\n, 2", "SELECT 1\n, 2"),
    ("SELECT/**/1", "SELECT 1"),
    ("SELECT /*+ BROADCAST(t) */ * FROM t", "SELECT /*+ BROADCAST(t) */ * FROM t"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_rewriting(text: str, wanted: str) -> None:
    assert to_spark(text).text == wanted


CUTS: list[tuple[str, str]] = [
    ("a::varchar(3)", "left(a::string, 3)"),
    ("1 + t.a::char(3)", "1 + rpad(t.a::string, 3, ' ')"),
    ("a::varchar(3)::varchar(2)", "left(left(a::string, 3)::string, 2)"),
    ("-f(a, (b))::character varying(9)", "-left(f(a, (b))::string, 9)"),
    ("CASE WHEN a THEN (b)::varchar(3) END", "CASE WHEN a THEN left((b)::string, 3) END"),
    ("x IN (1)::varchar(2)", "x IN left((1)::string, 2)"),
    ("a[1]::varchar(3), 5", "left(get(a, 0)::string, 3), 5"),
    ("CAST(a || 'x' AS varchar(3))", "left(CAST(a || 'x' AS string), 3)"),
    ("CAST(CAST(a AS char) AS text)", "CAST(rpad(CAST(a AS string), 1, ' ') AS string)"),
    ("CAST(a AS varchar(3))::varchar(2)", "left(left(CAST(a AS string), 3)::string, 2)"),
    ("DATE '2024-01-01'::varchar(4)", "left(DATE '2024-01-01'::string, 4)"),
    ("a::varchar", "a::string"),
    ("'\\xde'::text", "'\\\\xde'::string"),
    ("NULL::bytea", "NULL::binary"),
    ("CAST(NULL AS uuid)", "CAST(NULL AS string)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), CUTS)
def test_casts_cut_and_fill_as_postgresql_does(text: str, wanted: str) -> None:
    assert to_spark(f"SELECT {text}").text == f"SELECT {wanted}"


ARRAYS: list[tuple[str, str]] = [
    ("ARRAY[1, a[2]], 3", "array(1, get(a, 1)), 3"),
    ("t.a[i]::text, 3", "get(t.a, CAST((i) - 1 AS INT))::string, 3"),
    ("a::int[3], 1", "a::array<int>, 1"),
    ("(f(a)[2])[10]", "get((get(f(a), 1)), 9)"),
    ("m['k'], a::int[], CAST(a AS int[])", "m['k'], a::array<int>, CAST(a AS array<int>)"),
    ("array [ARRAY['b']]::text[][]", "array(array('b'))::array<array<string>>"),
    ("(b)<>all (ARRAY[1, c::int8]) AND d", "(b)NOT IN (1, c::bigint) AND d"),
    ("1 = ANY(ARRAY[]), 2", "1 IN (SELECT NULL WHERE false), 2"),
    ("1 = ANY(a), b = some(ARRAY[1]::int8[])", "1 = ANY(a), b = some(array(1)::array<bigint>)"),
    ("1 = ANY (SELECT 2), a = some",) * 2,
    ("penstock.public.t.a, \"penstock\".\"public\".t", "t.a, t"),
    ("penstock.objects.a, penstock.public, a.penstock.public.t",) * 2,
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), ARRAYS)
def test_arrays_and_qualified_names_are_written_as_sparks(text: str, wanted: str) -> None:
    assert to_spark(f"SELECT {text}").text == f"SELECT {wanted}"


@pytest.mark.parametrize("text", ["a[1:2]", "a[:2]", "a[i:]", "CASE WHEN x THEN a END [1]"])
def test_subscripts_that_are_not_known_are_refused(text: str) -> None:
    with pytest.raises(SqlSyntaxError, match="array"):
        to_spark(f"SELECT {text} FROM t")


BRACKETED: list[tuple[str, str]] = [
    ("('{1,2}'::int8[])::int[]", "(CAST(array(1L, 2L) AS array<bigint>))::array<int>"),
    ("f(a, (E'{x,\\\\\\\\}')::text[])", "f(a, CAST(array('x', '\\\\') AS array<string>))"),
    ("( '\\x41' )::bytea::bytea", "X'41'::binary"),
    ("('ab')::varchar(1)", "left(('ab')::string, 1)"),
    ("x IN ('a')::text", "x IN ('a')::string"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), BRACKETED)
def test_texts_in_brackets_are_cast_as_texts(text: str, wanted: str) -> None:
    assert to_spark(f"SELECT {text}", read_typed=typed_literal).text == f"SELECT {wanted}"


@pytest.mark.parametrize("text", ["f('x')::uuid", "('a' || 'b')::uuid", "'x'::text::uuid"])
def test_other_operands_of_checked_types_are_refused(text: str) -> None:
    with pytest.raises(SqlSyntaxError, match="cannot cast an expression to uuid"):
        to_spark(f"SELECT {text}", read_typed=typed_literal)


@pytest.mark.parametrize("lock", ["FOR UPDATE", "FOR SHARE OF t", "LIMIT 1 for no key update"])
def test_locks_are_refused_by_name(lock: str) -> None:
    with pytest.raises(SqlSyntaxError, match="rows cannot be locked"):
        to_spark(f"SELECT * FROM t {lock}")
    kept = "SELECT substring(a FROM 1 FOR c), b FROM t FOR TIMESTAMP AS OF '2024-01-01'"
    assert to_spark(kept).text == kept


@pytest.mark.parametrize("kind", ["timestamp(0)", "timestamp(3) with time zone"])
def test_times_of_fewer_digits_are_refused(kind: str) -> None:
    """PostgreSQL rounds them."""
    for text in (f"SELECT a::{kind}", f"SELECT CAST(a AS {kind})"):
        with pytest.raises(SqlSyntaxError, match="microsecond precision"):
            to_spark(text)


UNNESTED: list[tuple[str, str]] = [
    ("SELECT unnest(a), b", "SELECT explode(a) AS `unnest`, b"),
    ("SELECT u FROM t, pg_catalog.unnest(a) u", "SELECT u FROM t, LATERAL explode(a) u(u)"),
    ("SELECT * FROM unnest(a) AS v(n) WHERE n", "SELECT * FROM explode(a) AS v(n) WHERE n"),
    (
        "SELECT * FROM unnest(a, f(1, 2))",
        "SELECT * FROM inline(arrays_zip(coalesce(a, array()), coalesce( f(1, 2), array())))"
        " AS unnest(unnest, unnest)",
    ),
    ("SELECT unnest FROM unnest", ) * 2,
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), UNNESTED)
def test_arrays_are_unnested_as_relations_and_columns(text: str, wanted: str) -> None:
    assert to_spark(text, name_columns=True).text == wanted


@pytest.mark.parametrize("text", ["unnest(a, b)", "a FROM unnest(b) WITH ORDINALITY"])
def test_an_unnest_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(SqlSyntaxError, match="unnest"):
        to_spark(f"SELECT {text}")


OWN = "generate_series(generate_series)"
SERIES: list[tuple[str, str]] = [
    ("SELECT {}, 1", "SELECT {} AS `generate_series`, 1 AS `?column?`"),
    ("SELECT g FROM {} g WHERE x", "SELECT g FROM {} g(g) WHERE x"),
    ('SELECT 2 a FROM t, {} AS "b c"', "SELECT 2 a FROM t, LATERAL {} AS `b c`(`b c`)"),
    ("SELECT i FROM t JOIN LATERAL {} AS g(i) ON x", ) * 2,
    ("SELECT i FROM t FULL OUTER JOIN {} g(i) ON x", ) * 2,
    ("SELECT * FROM t LEFT JOIN {} ON x", f"SELECT * FROM t LEFT JOIN LATERAL {{}} AS {OWN} ON x"),
    ("TABLE t JOIN pg_catalog.{}", f"TABLE t JOIN LATERAL {{}} AS {OWN}"),
    ("SELECT * FROM (SELECT 1 a) q, {}", f"SELECT * FROM (SELECT 1 a) q, LATERAL {{}} AS {OWN}"),
    ("SELECT a FROM t ORDER BY b, {}", ) * 2,
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), SERIES)
def test_series_are_relations_and_columns(text: str, wanted: str) -> None:
    found = to_spark(text.format("generate_series(1, 3)"), name_columns=True).text
    call = r"explode\(.*named_struct\('a', \(1\), 'b', \( 3\)\).* sequence\(p\.a, p\.b\).*\)"
    assert re.fullmatch(re.escape(wanted).replace(r"\{\}", call), found), found


@pytest.mark.parametrize(
    "operands",
    [
        "1",
        "1, 2, 3, 4",
        "'2024-01-01'::date, d, '1 day'",
        "'2024-01-01'::date, '2024-02-01'::date, '1 month'",
        "'2024-01-01'::date, '2024-02-01'::date, '1 day -1 hour'",
        "'2024-01-01'::date, '2024-02-01'::date",
        "'2024-01-01'::date, '2024-02-01'::timestamp, '1 day'",
        "1 + '2024-01-01'::date, '2024-02-01'::date, '1 day'",
    ],
)
def test_other_series_are_refused(operands: str) -> None:
    with pytest.raises(SqlSyntaxError, match="generate_series"):
        to_spark(f"SELECT generate_series({operands})")


def test_a_day_has_one_length_in_utc_alone() -> None:
    text = "SELECT generate_series('2024-01-01'::{0}, '2024-02-01'::{0}, '1 day')"
    rome = TimeLiterals("Europe/Rome", "Europe/Rome")
    assert "INTERVAL '1' DAY" in to_spark(text.format("timestamp"), times=rome).text
    for kind in ("date", "timestamptz"):
        assert "INTERVAL '1' DAY" in to_spark(text.format(kind)).text
        with pytest.raises(SqlSyntaxError, match="generate_series"):
            to_spark(text.format(kind), times=rome)


def test_blanks_of_a_char_go_by_its_role() -> None:
    text = "SELECT x::char(3) = 'a ', x::char(3), $1"
    roles = {text.index(each): "char" for each in ("char", "'a", "$1")}
    read = to_spark(text, ["'b '"], role_of=lambda at: roles.get(at, "")).text
    assert read == "SELECT rtrim(left(x::string, 3)) = 'a', rpad(x::string, 3, ' '), rtrim('b ')"
    with pytest.raises(SqlSyntaxError, match="cast to text"):
        to_spark(text, role_of=lambda _: "char column")


def test_places_are_read_by_their_roles() -> None:
    text = r"SELECT '\134', max(at)::varchar(9), CAST(t.at AS text)"
    roles = {text.index("'"): "bytea"} | {
        text.index(kind): "timestamptz" for kind in ("varchar", "text")
    }
    read = to_spark(text, read_typed=typed_literal, role_of=lambda at: roles.get(at, "")).text
    clock = r"regexp_replace\(date_format\({}, '[^']+'\), '[^']+', ''\)"
    times = [clock.format(each) for each in (r"max\(at\)", r"\(t\.at \)")]
    assert re.fullmatch(rf"SELECT X'5C', left\({times[0]}, 9\), {times[1]}", read), read


MEMBERS: list[tuple[str, list[str], str]] = [
    ("a = ANY($1)", ["array(1, NULL)"], "a IN (1, NULL)"),
    ("a <> ALL ($1::int[])", ["CAST(array() AS array<int>)"], "a NOT IN (SELECT NULL WHERE false)"),
    ("a = SOME ($1::int[]), b", ["CAST(NULL AS array<int>)"], "a IN (NULL), b"),
    ("a = ANY('{x}'::text[])", [], "a IN ('<x>')"),
    ("a = ANY($1::text[])", ["'{y}'"], "a IN ('<{y}>')"),
    ("a = ANY(CAST($1 AS text[]))", ["'{y}'"], "a IN ('<{y}>')"),
    ("a <> ALL (((($1))))", ["array(1)"], "a NOT IN (1)"),
    ("a = ANY ((CAST('{x}' AS text[])))", [], "a IN ('<x>')"),
    ("a = ANY ((SELECT 1))", [], "a = ANY ((SELECT 1))"),
    ("a = ANY (CAST(b AS int[]))", [], "a = ANY (CAST(b AS array<int>))"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parameters", "wanted"), MEMBERS)
def test_members_of_an_array_are_a_list(text: str, parameters: list[str], wanted: str) -> None:
    def read(value: str, kind: WrittenType) -> str:
        inner = value.strip("{}") if not parameters else value
        return f"array('<{inner}>')" if kind.spark.startswith("array<") else ""

    assert to_spark(f"SELECT {text}", parameters, read_typed=read).text == f"SELECT {wanted}"


TYPED: list[tuple[str, list[str], str]] = [
    ("'a'::bytea", [], "<bytea a>"),
    ("bytea 'a' || 'b'", [], "<bytea a> || 'b'"),
    ("CAST('it''s' AS uuid), 1", [], "<uuid it's>, 1"),
    ("$1::jsonb", ["'a'"], "<jsonb a>"),
    ("CAST($1 AS json)", ["'it\\'s'"], "<json it's>"),
    ("$1::bytea", ["X'00'"], "(X'00')"),
    ("E'\\\\x00'::bytea", [], "<bytea \\x00>"),
    ("'5'::int4", [], "'5'::int"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parameters", "wanted"), TYPED)
def test_texts_are_read_as_the_type_they_are_cast_to(
    text: str, parameters: list[str], wanted: str
) -> None:
    def read(value: str, kind: WrittenType) -> str:
        return f"<{kind.name} {value}>" if kind.checked else ""

    assert to_spark(f"SELECT {text}", parameters, read_typed=read).text == f"SELECT {wanted}"


PARAMETERS: list[tuple[str, list[str], str]] = [
    ("SELECT $1", ["5"], "SELECT 5"),
    ("SELECT $2, $1, $2", ["5", "'x'"], "SELECT 'x', 5, 'x'"),
    ("SELECT 1 -$1", ["-5"], "SELECT 1 -(-5)"),
    ("SELECT $1::int8", ["CAST('1' AS bigint)"], "SELECT (CAST('1' AS bigint))::bigint"),
    ("SELECT $1::int8 + $2::int2, $3::int4", ["7S", "(-5L)", "7L"], "SELECT 7L + (-5S), 7"),
    ("SELECT $1::text, $2::varchar(3)", ["'a'", "'b'"], "SELECT 'a', left('b'::string, 3)"),
    ("SELECT $1::int2::text, $2::int4", ["7L", "'7'"], "SELECT 7S::string, '7'::int"),
    ("SELECT $1::date", ["DATE '2024-01-01'"], "SELECT (DATE '2024-01-01')"),
    ("SELECT $1::smallint", ["70000"], "SELECT 70000::smallint"),
    ("SELECT 1 WHERE a=$1and b", ["5"], "SELECT 1 WHERE a=5 and b"),
    ("SELECT $1", ["NULL"], "SELECT NULL"),
    ("SELECT '$1', \"$1\", $$$1$$", ["5"], "SELECT '$1', `$1`, '$1'"),
    ("SELECT 'a'$1", ["'b'"], "SELECT 'a' 'b'"),
    ("SELECT a FROM t LIMIT $1", ["1 + 2"], "SELECT a FROM t LIMIT (1 + 2)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parameters", "wanted"), PARAMETERS)
def test_parameters(text: str, parameters: list[str], wanted: str) -> None:
    assert to_spark(text, parameters).text == wanted


# The mark stands where the error is.
ERRORS: list[tuple[str, str]] = [
    ("SELECT ¦$2", "no value for parameter $2; parameters given: 1"),
    ("SELECT ¦$0", "no value for parameter $0"),
    ("SELECT ¦$99999999999999999999", "no value for parameter $9999999"),
    ("SELECT ¦'a", "a string is not closed"),
    (r"SELECT ¦E'\377'", "invalid escape in a string: it does not denote a character"),
    ("SELECT a::¦5", "expected a type, found '5'"),
    ("SELECT CAST(a AS ¦5)", "expected a type, found '5'"),
    ("SELECT ¦(a", "'(' is not closed"),
    ("SELECT a::¦bytea", "cannot cast an expression to bytea"),
    ("SELECT CAST(a AS ¦uuid)", "cannot cast an expression to uuid"),
    ("SELECT 'a'::text::¦json", "cannot cast an expression to json"),
    ("SELECT a::¦varchar(3)[]", "cannot cast an expression to array<varchar(3)>"),
    ("SELECT sum(a) OVER (b)::¦varchar(3)", "cannot tell what this cast applies to"),
    ("SELECT CASE a END::¦char(3)", "cannot tell what this cast applies to"),
    (r"SELECT a = ¦'\xde'", r"cannot tell the type of '\xde' here"),
]  # fmt: skip


@pytest.mark.parametrize(("marked", "problem"), ERRORS)
def test_errors_say_where(marked: str, problem: str) -> None:
    text, position = marked.replace("¦", ""), marked.index("¦")
    with pytest.raises(SqlSyntaxError) as caught:
        to_spark(text, ["1"])
    assert caught.value.position == position
    assert str(caught.value).partition(": ")[2].startswith(problem)


# In both texts the mark stands at the same token.
POSITIONS: list[tuple[str, str]] = [
    ("SELECT ¦a", "SELECT ¦a"),
    ('SELECT "long name", ¦x', "SELECT `long name`, ¦x"),
    ("SELECT E'\\x41\\x41', ¦x", "SELECT 'AA', ¦x"),
    ("SELECT a::int8, ¦x", "SELECT a::bigint, ¦x"),
    ("SELECT ¦$1, x", "SELECT ¦1234567, x"),
    ("SELECT $1, ¦x", "SELECT 1234567, ¦x"),
    ("SELECT pg_catalog.f(¦x)", "SELECT f(¦x)"),
    ("SELECT a::¦int8", "SELECT a::¦bigint"),
    ("SELECT /* a */ 'b''c' AS ¦x", "SELECT 'b\\'c' AS ¦x"),
    ("SELECT\n1 -- a\n, ¦x", "SELECT\n1\n, ¦x"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), POSITIONS)
def test_positions_lead_back(old: str, new: str) -> None:
    rewritten = to_spark(old.replace("¦", ""), ["1234567"])
    assert rewritten.original_position(new.index("¦")) == old.index("¦")


def test_within_a_replaced_part_a_position_is_its_begin() -> None:
    rewritten = to_spark("SELECT $1, x", ["1234567"])
    for position in range(7, 14):
        assert rewritten.original_position(position) == 7
    assert rewritten.original_position(14) == 9
    assert rewritten.original_position(len(rewritten.text)) == len("SELECT $1, x")


PIECES = (
    *("SELECT", "a", "é", "1", "1.5", ",", ".", "(", ")", "+", "-", "*", "<>", "||", "$1", "\n"),
    *("'b'", "'c''d'", "'e\\f'", "E'g\\'h'", "$$i$$", "$j$k$$l$j$", '"m"', '"n""o"', "`p`"),
    *("-- x\\\n", "/* y */", "/* /*+ y */ */", "/*+ z */"),
    # Two of these are one sign to Spark.
    " = ",
)
texts = st.lists(
    st.tuples(st.sampled_from(PIECES), st.sampled_from(["", " ", "\n"])), max_size=25
).map(lambda drawn: "".join(piece + gap for piece, gap in drawn))


@given(texts, st.sampled_from(["5", "'it\\'s'", "a + b"]))
def test_spark_reads_the_same_tokens(text: str, parameter: str) -> None:
    """Where nothing is cast, the new text has the same tokens, in Spark's dialect."""
    try:
        rewritten = to_spark(text, [parameter])
    except SqlSyntaxError:
        return
    before, after = lex_sql(text, POSTGRES), lex_sql(rewritten.text)
    # A dollar sign in a word is PostgreSQL's alone, and no parameter is a part of a name.
    assume(not any(token.kind == "word" and "$" in token.text for token in before))
    assume("$1." not in text and ".$1" not in text)
    wanted: list[tuple[str, str]] = []
    for token in before:
        if token.kind == "text":
            wanted.append(("text", text_value(token.text, POSTGRES)))
        elif token.kind == "name":
            wanted.append(("name", name_value(token.text)))
        elif token.kind == "parameter" and parameter == "5":
            wanted.append(("number", parameter))
        elif token.kind == "parameter" and parameter.startswith("'"):
            wanted.append(("text", text_value(parameter)))
        elif token.kind == "parameter":
            wanted += [("sign", "("), ("word", "a"), ("sign", "+"), ("word", "b"), ("sign", ")")]
        else:
            wanted.append((token.kind, token.text))
    found = [
        (token.kind, text_value(token.text))
        if token.kind == "text"
        else (token.kind, name_value(token.text) if token.kind == "name" else token.text)
        for token in after
    ]
    assert found == wanted


@given(texts)
def test_positions_never_go_back(text: str) -> None:
    try:
        rewritten = to_spark(text, ["5"])
    except SqlSyntaxError:
        return
    places = [rewritten.original_position(at) for at in range(len(rewritten.text) + 1)]
    assert places == sorted(places)
    assert places[0] == 0
    assert all(0 <= place <= len(text) for place in places)

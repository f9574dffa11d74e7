"""The lexer: kinds of tokens in both dialects, positions, values of literals."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sql_shown import POSTGRES, SPARK, check_position  # type: ignore[import-not-found]

from actors.engine.sql.tokens import (
    SqlDialect,
    lex_sql,
    line_and_column,
    name_value,
    quote_name,
    quote_text,
    text_value,
)
from actors.runtime.errors import SqlSyntaxError

CASES: list[tuple[SqlDialect, str, str]] = [
    (SPARK, "a.b", "word:a sign:. word:b"),
    (SPARK, "`a``b`.`c d`", "name:`a``b` sign:. name:`c d`"),
    (SPARK, "'it''s' 'a\\'b' \"x\"", "text:'it''s' text:'a\\'b' text:\"x\""),
    (SPARK, "r'\\' R\"a\"", "text:r'\\' text:R\"a\""),
    (SPARK, "1 1L 1.5BD 1e3 .5 1. 2.D", "number:1 number:1L number:1.5BD number:1e3"
     " number:.5 number:1. number:2.D"),
    (SPARK, "1a 1e 0x1F", "word:1a word:1e word:0x1F"),
    (SPARK, "1.a", "number:1 sign:. word:a"),
    (SPARK, ":name ? a:b", "parameter::name parameter:? word:a sign:: word:b"),
    (SPARK, "a::int", "word:a sign::: word:int"),
    (SPARK, "a<=>b<>c!=d==e||f->g=>h", "word:a sign:<=> word:b sign:<> word:c sign:!= word:d"
     " sign:== word:e sign:|| word:f sign:-> word:g sign:=> word:h"),
    (SPARK, "array<array<int>>", "word:array sign:< word:array sign:< word:int sign:> sign:>"),
    (SPARK, "a -- b\nc", "word:a word:c"),
    (SPARK, "a -- b\\\nc\nd", "word:a word:d"),
    (SPARK, "a -- b\rc", "word:a word:c"),
    (SPARK, "a /* /* b */ c */ d", "word:a word:d"),
    (SPARK, "/*+ MAPJOIN(t) */ a", "hint:/*+ MAPJOIN(t) */ word:a"),
    (SPARK, "größe", "word:größe"),
    (SPARK, "$1", "sign:$ number:1"),
    (POSTGRES, '"a""b" `c`', 'name:"a""b" name:`c`'),
    (POSTGRES, "'a\\' E'b\\'c' 'd''e'", "text:'a\\' text:E'b\\'c' text:'d''e'"),
    (POSTGRES, "$$a'b$$ $x$ $$ $x$", "text:$$a'b$$ text:$x$ $$ $x$"),
    (POSTGRES, "$1 $23", "parameter:$1 parameter:$23"),
    (POSTGRES, "a$1 b$$c", "word:a$1 word:b$$c"),
    (POSTGRES, "x::int4", "word:x sign::: word:int4"),
    (POSTGRES, "? :a", "sign:? sign:: word:a"),
    (POSTGRES, "a -- b\\\nc", "word:a word:c"),
    (POSTGRES, "1L", "word:1L"),
    (POSTGRES, "/* /*+ */ */ a", "word:a"),
    (POSTGRES, "U + '&'", "word:U sign:+ text:'&'"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "wanted"), CASES)
def test_kinds_of_tokens(dialect: SqlDialect, text: str, wanted: str) -> None:
    assert " ".join(f"{each.kind}:{each.text}" for each in lex_sql(text, dialect)) == wanted


UNENDED: list[tuple[SqlDialect, str, int, str]] = [
    (SPARK, "SELECT 'a", 7, "a string is not closed"),
    (SPARK, "'''", 0, "a string is not closed"),
    (SPARK, "'a\\'", 0, "a string is not closed"),
    (SPARK, 'a "b', 2, "a text in double quotes is not closed"),
    (SPARK, "a `b", 2, "a name in backticks is not closed"),
    (SPARK, "a /* b /* c */", 2, "a comment is not closed"),
    (SPARK, "a /*+ b", 2, "a comment is not closed"),
    (SPARK, "r'a", 1, "a string is not closed"),
    (POSTGRES, "a $$b", 2, "a string in $$ is not closed"),
    (POSTGRES, "a $x$b$$", 2, "$x$ is not closed"),
    (POSTGRES, "E'a\\'", 0, "a string is not closed"),
    (POSTGRES, 'a "b', 2, "a text in double quotes is not closed"),
    (POSTGRES, "U&'a'", 0, "U&' is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "position", "problem"), UNENDED)
def test_what_does_not_end(dialect: SqlDialect, text: str, position: int, problem: str) -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        lex_sql(text, dialect)
    assert caught.value.position == position
    assert caught.value.problem == f"line 1, column {position + 1}: {problem}"


@pytest.mark.parametrize(
    ("offset", "wanted"), [(0, (1, 1)), (1, (1, 2)), (2, (2, 1)), (3, (2, 2)), (5, (3, 1))]
)
def test_lines_and_columns(offset: int, wanted: tuple[int, int]) -> None:
    assert line_and_column("a\nbc\nd", offset) == wanted


VALUES: list[tuple[SqlDialect, str, str]] = [
    (SPARK, "''", ""),
    (SPARK, "'a''b'", "a'b"),
    (SPARK, "\"a\"\"b'c\"", "a\"b'c"),
    (SPARK, "'a\"\"b'", 'a""b'),
    (SPARK, r"'\n\t\\\'\%\_\q'", "\n\t\\'\\%\\_q"),
    (SPARK, r"'\u00e9\U0001F600\101'", "é😀A"),
    (SPARK, r"'\ud83d\ude00'", "😀"),
    (SPARK, r"'\u00'", "u00"),
    (SPARK, r"'\0'", "\0"),
    (SPARK, r"r'\n'", r"\n"),
    (POSTGRES, r"'\n''x'", r"\n'x"),
    (POSTGRES, r"E'\n\\\'''\x41\101\u00e9'", "\n\\''AAé"),
    (POSTGRES, r"E'\303\251'", "é"),
    (POSTGRES, r"E'\q'", "q"),
    (POSTGRES, "$$a'b$$", "a'b"),
    (POSTGRES, "$t$a$$b$t$", "a$$b"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "written", "value"), VALUES)
def test_values_of_strings(dialect: SqlDialect, written: str, value: str) -> None:
    (token,) = lex_sql(written, dialect)
    assert token.kind == "text"
    assert text_value(written, dialect) == value


@pytest.mark.parametrize(
    ("dialect", "written"),
    [
        (SPARK, r"'\ud83d'"),
        (SPARK, r"'\UFFFFFFFF'"),
        (POSTGRES, r"E'\377'"),
        (POSTGRES, r"E'\UFFFFFFFF'"),
    ],
)
def test_escapes_that_are_no_character(dialect: SqlDialect, written: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        text_value(written, dialect)


# Characters that mean something to a lexer, and some that do not.
MARKS = (
    "' '' \" \"\" ` `` \\ \\' /* */ /*+ -- \t \r ; ( ) [ ] < > :: : ? $ $$ $1 $a$ . , E' r' u& 1"
    " 1.5 1e 1L a é 😀 SELECT AS OF"
)
scraps = st.lists(
    st.one_of(st.sampled_from([*MARKS.split(" "), "\n"]), st.characters(codec="utf-8")),
    max_size=30,
).map("".join)


@given(scraps, st.sampled_from(SqlDialect))
def test_tokens_and_the_gaps_between_them_are_the_text(text: str, dialect: SqlDialect) -> None:
    try:
        found = lex_sql(text, dialect)
    except SqlSyntaxError as error:
        check_position(error, text)
        return
    at = 0
    for token in found:
        gap = text[at : token.start]
        assert token.start >= at
        # A gap that is no blank begins with a comment, after blanks.
        assert not gap.strip() or gap.strip().startswith(("--", "/*"))
        assert text[token.start : token.end] == token.text
        assert token.text
        at = token.end
    rest = text[at:].strip()
    assert not rest or rest.startswith(("--", "/*"))


@given(st.text())
def test_names_come_back(name: str) -> None:
    written = quote_name(name)
    for dialect in SqlDialect:
        (token,) = lex_sql(written, dialect)
        assert token.kind == "name"
        assert name_value(token.text) == name


@given(st.one_of(st.text(), st.text("'\\%_nu0\"")))
def test_texts_come_back(value: str) -> None:
    (token,) = lex_sql(quote_text(value))
    assert text_value(token.text) == value


@given(st.one_of(st.text(), st.text("'\\%_nu0\"$")))
def test_texts_of_postgres_come_back(value: str) -> None:
    standard = "'" + value.replace("'", "''") + "'"
    escaped = "E'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    for written in (standard, escaped):
        (token,) = lex_sql(written, POSTGRES)
        assert text_value(token.text, POSTGRES) == value


def test_long_texts_take_one_pass() -> None:
    """Each of these had a quadratic way to be read: seconds instead of milliseconds."""
    long = 300_000
    begun = time.process_time()
    found = []
    for text in ("1" * long + "a", "'" + "a" * long, "'" * long, "$a$" + "$" * long, " " * long):
        for dialect in SqlDialect:
            try:
                found.append(len(lex_sql(text, dialect)))
            except SqlSyntaxError as error:
                check_position(error, text)
                found.append(-1)
    assert found == [1, 1, -1, -1, 1, 1, long + 3, -1, 0, 0]
    assert time.process_time() - begun < 5

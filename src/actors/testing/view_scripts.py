"""View scripts: the text format of tests that check a view's results.

One file contains tables, views, directives and changes (see the docs of `penstock check-views`).
`parse_script` reads the whole file and raises `ScriptError` with the line of the mistake. Rows are
kept as texts of expressions; `rows_of` evaluates them and checks that every removed row exists.
`--! random` generates the changes from a seed instead.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, localcontext
from typing import Any, Final, TypeAlias

import msgspec
from sqlglot.errors import SqlglotError

from actors.engine.spark.spark_releases import release_of
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.runtime.errors import InvalidUsage, PenstockError, QueryRejected
from actors.testing.expressions import WIDE, cast_value, compile_text, decimal_digits
from actors.testing.nodes import frozen

Constant: TypeAlias = tuple[str, str]
"""Text of an expression, and the type that it is cast to."""

_NAME: Final = r"`[^`]+`|\w+"
MODES: Final = ("incremental", "keyed", "opaque", "refused")
POLICIES: Final = ("auto", "incremental", "incremental strict", "full")


class ScriptError(InvalidUsage):
    """Raised for an invalid script. The message starts with file and line."""


class ViewText(msgspec.Struct, frozen=True):
    """A view as written. Plain views are inlined into the views that read them."""

    name: str
    sql: str
    line: int
    materialized: bool


class ScriptExpectation(msgspec.Struct, frozen=True):
    """``--! expect``: a mode (or refusal), or an error in ``start <= t < end``.

    ``--! expect-parsed``: overrides that mode on an engine that shows no plans (a parser).
    """

    view: str
    kind: str
    text: str
    line: int
    start: int = 0
    end: int = 0
    parsed: bool = False

    def is_mode(self) -> bool:
        """Return whether it is the expected mode on an engine that shows its plans."""
        return self.kind != "error" and not self.parsed


class ScriptChange(msgspec.Struct, frozen=True):
    """One ``+`` or ``-`` line."""

    time: int
    table: str
    row: tuple[str, ...]
    diff: int
    line: int


class RandomChanges(msgspec.Struct, frozen=True):
    """``--! random ROWS BATCHES SEED``."""

    rows: int
    batches: int
    seed: int


class ViewScript(msgspec.Struct):
    """A parsed script."""

    path: str
    tables: dict[str, TableSchema] = {}
    """Schemas of the tables, by name."""
    views: list[ViewText] = []
    """Views in the order of the script."""
    expectations: list[ScriptExpectation] = []
    policies: dict[str, str] = {}
    """Refresh policies by view."""
    conf: tuple[tuple[str, str], ...] = ()
    """Settings for all views."""
    times: list[int] = []
    """Times given by ``@ TIME`` lines, ascending."""
    changes: list[ScriptChange] = []
    random: RandomChanges | None = None
    determined: bool = False
    """``--! determined``: no query leaves a choice to Spark, even if it seems to."""
    growing: set[str] = set()
    """``--! growing``: views for which the number of rows that a change touches grows with the
    state."""
    eager: set[str] = set()
    """``--! eager``: views that sum a table below a join, whatever the sizes are."""
    since: dict[str, tuple[int, int]] = {}
    """``--! since``: the first Spark release that knows what a view uses."""


class ScriptUpdate(msgspec.Struct, frozen=True):
    """One evaluated change."""

    time: int
    table: str
    row: tuple[Any, ...]
    diff: int


def parse_script(text: str, path: str = "script") -> ViewScript:
    """Return the script. Raises `ScriptError` with the line."""
    script = ViewScript(path)
    pending: list[str] = []
    first_line = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if pending:
            pending.append(line)
        elif stripped.startswith("--!"):
            _directive(script, stripped[3:].split(), number)
        elif not stripped or stripped.startswith("--"):
            continue
        elif stripped.startswith("@"):
            _time(script, stripped[1:].strip(), number)
        elif stripped[0] in "+-":
            script.changes.append(_change(script, stripped, number))
        else:
            pending, first_line = [line], number
        if pending and _code(line).endswith(";"):
            statement = "\n".join(_code_of(one) for one in pending).strip().rstrip(";").strip()
            _statement(script, statement, first_line)
            pending = []
    if pending:
        raise _wrong(script, first_line, "the statement does not end with ';'")
    _check_names(script)
    return script


def _wrong(script: ViewScript, line: int, text: str) -> ScriptError:
    return ScriptError(f"{script.path}:{line}: {text}")


def _code(line: str) -> str:
    return _code_of(line).rstrip()


def _code_of(line: str) -> str:
    """Return the line without a trailing comment (quotes respected)."""
    return re.sub(r"^((?:[^'-]|'(?:[^'\\]|\\.)*'|-(?!-))*)--.*$", r"\1", line)


def _directive(script: ViewScript, words: list[str], line: int) -> None:
    name, rest = (words[0], words[1:]) if words else ("", [])
    try:
        if name == "expect" and len(rest) >= 4 and rest[1] == "error":
            start, end = int(rest[2]), int(rest[3])
            text = " ".join(rest[4:])
            script.expectations.append(ScriptExpectation(rest[0], "error", text, line, start, end))
        elif name == "expect" and len(rest) >= 2 and rest[1] in MODES:
            text = " ".join(rest[2:])
            script.expectations.append(ScriptExpectation(rest[0], rest[1], text, line))
        elif name == "expect-parsed" and len(rest) >= 2 and rest[1] in MODES:
            text = " ".join(rest[2:])
            script.expectations.append(ScriptExpectation(rest[0], rest[1], text, line, parsed=True))
        elif name == "policy" and " ".join(rest[1:]) in POLICIES:
            script.policies[rest[0]] = " ".join(rest[1:])
        elif name == "conf" and len(rest) >= 2:
            script.conf = (*script.conf, (rest[0], " ".join(rest[1:])))
        elif name == "determined" and not rest:
            script.determined = True
        elif name == "growing" and len(rest) == 1:
            script.growing.add(rest[0])
        elif name == "eager" and len(rest) == 1:
            script.eager.add(rest[0])
        elif name == "since" and len(rest) == 2 and re.fullmatch(r"\d+\.\d+", rest[1]):
            script.since[rest[0]] = release_of(rest[1])
        elif name == "random" and len(rest) == 3:
            script.random = RandomChanges(*(int(word) for word in rest))
        else:
            raise _wrong(script, line, f"unknown directive: --! {' '.join(words)}")
    except ValueError:
        raise _wrong(script, line, f"not a whole number in: --! {' '.join(words)}") from None


def _time(script: ViewScript, text: str, line: int) -> None:
    text = _code(text).strip()
    if not text.lstrip("-").isdigit():
        raise _wrong(script, line, f"@ {text}: a time is a whole number")
    time = int(text)
    if time < 0 or (script.times and time <= script.times[-1]):
        raise _wrong(script, line, f"@ {time}: times must not be negative and must increase")
    script.times.append(time)


def _change(script: ViewScript, text: str, line: int) -> ScriptChange:
    found = re.fullmatch(rf"([+-])(\d*)\s+({_NAME})\s*\((.*)\)\s*;?\s*", _code(text), re.DOTALL)
    if found is None:
        raise _wrong(
            script, line, "invalid change: expected + TABLE (values), with +N or -N for N copies"
        )
    if not script.times:
        raise _wrong(script, line, "a change before the first '@ TIME'")
    sign, count, quoted, values = found.groups()
    name = quoted.strip("`").lower()
    schema = script.tables.get(name)
    if schema is None:
        raise _wrong(script, line, f"no table named {name!r} above this line")
    row = tuple(value.strip() for value in split_top(values))
    if len(row) != len(schema.columns):
        raise _wrong(
            script, line, f"{name} has {len(schema.columns)} columns, the row has {len(row)}"
        )
    diff = int(count or 1) * (1 if sign == "+" else -1)
    return ScriptChange(script.times[-1], name, row, diff, line)


def split_top(text: str) -> list[str]:
    """Split at commas outside quotes and brackets."""
    parts, depth, start, quote = [], 0, 0, ""
    index = 0
    while index < len(text):
        char = text[index]
        if quote:
            if char == "\\":
                index += 1
            elif char == quote:
                quote = ""
        elif char in "'\"`":
            quote = char
        elif char in "([<":
            depth += 1
        elif char in ")]>":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
        index += 1
    return [*parts, text[start:]]


def _statement(script: ViewScript, text: str, line: int) -> None:
    table = re.fullmatch(rf"create\s+table\s+({_NAME})\s*\((.*)\)", text, re.IGNORECASE | re.DOTALL)
    if table is not None:
        name = _new_name(script, table.group(1), line)
        script.tables[name] = _schema(script, table.group(2), line)
        return
    view = re.fullmatch(
        rf"create\s+(materialized\s+)?view\s+({_NAME})\s+as\s+(.*)", text, re.IGNORECASE | re.DOTALL
    )
    if view is None:
        raise _wrong(script, line, "expected CREATE TABLE or CREATE [MATERIALIZED] VIEW … AS")
    name = _new_name(script, view.group(2), line)
    script.views.append(ViewText(name, view.group(3), line, view.group(1) is not None))


def _new_name(script: ViewScript, name: str, line: int) -> str:
    low = name.strip("`").lower()
    if low in script.tables or any(view.name == low for view in script.views):
        raise _wrong(script, line, f"{name} already exists")
    return low


def _schema(script: ViewScript, text: str, line: int) -> TableSchema:
    columns: list[TableColumn] = []
    key: tuple[str, ...] = ()
    for part in split_top(text):
        words = part.strip()
        primary = re.fullmatch(r"primary\s+key\s*\((.*)\)", words, re.IGNORECASE)
        if primary is not None:
            key = tuple(name.strip().strip("`") for name in primary.group(1).split(","))
            continue
        column = re.fullmatch(r"(`[^`]+`|\w+)\s+(.*?)(\s+not\s+null)?", words, re.I | re.DOTALL)
        if column is None:
            raise _wrong(script, line, f"not a column: {words!r}")
        kind = re.sub(r"\s+", "", column.group(2)).lower()
        try:
            arrow_type(kind)
        except (InvalidUsage, ValueError) as error:
            raise _wrong(script, line, str(error)) from None
        columns.append(TableColumn(column.group(1).strip("`"), kind, column.group(3) is None))
    return TableSchema(tuple(columns), key)


def _check_names(script: ViewScript) -> None:
    views = {view.name for view in script.views}
    expected = {each.view.lower() for each in script.expectations if each.is_mode()}
    for expectation in script.expectations:
        name = expectation.view
        if name.lower() not in views:
            raise _wrong(script, expectation.line, f"no view named {name!r}")
        if expectation.parsed and name.lower() not in expected:
            raise _wrong(
                script,
                expectation.line,
                f"--! expect-parsed {name} needs an --! expect {name} with a mode",
            )
    if script.random is not None and script.changes:
        raise _wrong(
            script, script.changes[0].line, "a script may have changes or --! random, not both"
        )


def for_release(script: ViewScript, release: tuple[int, int]) -> ViewScript:
    """Return the script without the views that need a later Spark release.

    >>> lines = ("--! since b 4.2", "--! expect b keyed", "create table t (k int);")
    >>> views = (f"create materialized view {name} as select k from t;" for name in "ab")
    >>> script = parse_script("\\n".join([*lines, *views]))
    >>> older, newer = for_release(script, (4, 1)), for_release(script, (4, 3))
    >>> [view.name for view in older.views], older.expectations, newer == script
    (['a'], [], True)
    """
    later = {name.lower() for name, first in script.since.items() if first > release}
    return msgspec.structs.replace(
        script,
        views=[view for view in script.views if view.name not in later],
        expectations=[each for each in script.expectations if each.view.lower() not in later],
    )


def inlined(script: ViewScript, view: ViewText) -> str:
    """Return the view's query with the plain views before it as table expressions."""
    plain = [v for v in script.views if not v.materialized and v.line < view.line]
    used: list[ViewText] = []
    wanted = view.sql.lower()
    for other in reversed(plain):
        if re.search(rf"\b{re.escape(other.name)}\b", wanted):
            used.insert(0, other)
            wanted += " " + other.sql.lower()
    if not used:
        return view.sql
    heads = ", ".join(f"{other.name} AS ({other.sql})" for other in used)
    own = re.match(r"\s*with\s+", view.sql, re.IGNORECASE)
    return f"WITH {heads}, {view.sql[own.end() :]}" if own else f"WITH {heads} {view.sql}"


def rows_of(script: ViewScript, known: Mapping[Constant, Any] | None = None) -> list[ScriptUpdate]:
    """Return the changes, evaluated. `known` values come from the engine. Raises `ScriptError`."""
    if script.random is not None:
        return list(_random_updates(script, script.random))
    present: Counter[tuple[str, tuple[Any, ...]]] = Counter()
    updates = []
    for change in script.changes:
        row = tuple(
            _value(script, change, constant, known or {}) for constant in _constants(script, change)
        )
        present[change.table, row] += change.diff
        if present[change.table, row] < 0:
            raise _wrong(script, change.line, f"{change.table} has too few rows {row} to delete")
        updates.append(ScriptUpdate(change.time, change.table, row, change.diff))
    return updates


_PLAIN: Final = (
    (r"null", r".*"),
    (r"-?\d{1,18}", r"tinyint|smallint|int|bigint|double|decimal\(.*"),
    (r"-?\d{1,12}\.\d{1,6}", r"double"),
    (r"true|false", r"boolean"),
    (r"'[^'\\]*'", r"string"),
    (r"date '\d{4}-\d\d-\d\d'", r"date"),
)
"""Texts and types of values that need no engine, because there is only one way to read them."""


def _is_plain(text: str, kind: str) -> bool:
    return any(
        re.fullmatch(form, text, re.IGNORECASE) and re.fullmatch(types, kind)
        for form, types in _PLAIN
    )


def foreign_constants(script: ViewScript, *, plain: bool = False) -> list[Constant]:
    """Return the values in changes that only Spark can evaluate; with `plain` all but the simplest,
    so that Spark evaluates them and not the code here."""
    found: dict[Constant, None] = {}
    for change in script.changes:
        for text, kind in _constants(script, change):
            if plain:
                if not _is_plain(text, kind):
                    found[text, kind] = None
                continue
            try:
                _evaluated(text, kind)
            except QueryRejected:
                found[text, kind] = None
            except (PenstockError, ValueError):
                continue
    return list(found)


def _constants(script: ViewScript, change: ScriptChange) -> list[Constant]:
    columns = script.tables[change.table].columns
    return [(text, column.type) for text, column in zip(change.row, columns, strict=True)]


def _evaluated(text: str, kind: str) -> Any:
    _, function = compile_text(text, {})
    with localcontext(WIDE):
        return cast_value(function(()), kind)


def _value(
    script: ViewScript, change: ScriptChange, constant: Constant, known: Mapping[Constant, Any]
) -> Any:
    text, kind = constant
    if constant in known:
        return frozen(known[constant])
    try:
        return frozen(_evaluated(text, kind))
    except (PenstockError, SqlglotError, ValueError) as error:
        raise _wrong(script, change.line, f"{text} is not a {kind}: {error}") from None


def times_of(script: ViewScript) -> list[int]:
    """Return all times of the script, ascending."""
    if script.random is None:
        return script.times
    return [10 * (batch + 1) for batch in range(script.random.batches)]


def _random_updates(script: ViewScript, spec: RandomChanges) -> Iterator[ScriptUpdate]:
    """Yield updates with NULLs, duplicates, deletes, updates, skewed keys and empty batches."""
    generator = random.Random(spec.seed)
    present: dict[str, list[tuple[Any, ...]]] = {name: [] for name in script.tables}
    for time in times_of(script):
        if generator.random() < 0.1:
            continue
        for _ in range(max(1, spec.rows // max(1, spec.batches))):
            table = generator.choice(list(script.tables))
            rows = present[table]
            dice = generator.random()
            if rows and dice < 0.35:
                old = rows.pop(generator.randrange(len(rows)))
                yield ScriptUpdate(time, table, old, -1)
                if dice > 0.2:
                    continue
            duplicate = rows and generator.random() < 0.15
            row = generator.choice(rows) if duplicate else _random_row(script, table, generator)
            for old in _of_its_key(script.tables[table], rows, row):
                rows.remove(old)
                yield ScriptUpdate(time, table, old, -1)
            rows.append(row)
            yield ScriptUpdate(time, table, row, 1)


def _of_its_key(
    schema: TableSchema, rows: Sequence[tuple[Any, ...]], row: tuple[Any, ...]
) -> list[tuple[Any, ...]]:
    """Return the rows that a row replaces: those with its PRIMARY KEY."""
    places = [place for place, each in enumerate(schema.columns) if each.name in schema.key]
    return [each for each in rows if places and all(each[p] == row[p] for p in places)]


def _random_row(script: ViewScript, table: str, generator: random.Random) -> tuple[Any, ...]:
    return tuple(
        None
        if column.nullable and generator.random() < 0.15
        else random_value(column.type, generator)
        for column in script.tables[table].columns
    )


def random_value(kind: str, generator: random.Random) -> Any:
    """Return a value of a type from a small, skewed range, so that keys collide."""
    small = min(generator.randrange(8), generator.randrange(8))
    if kind in ("tinyint", "smallint", "int", "bigint"):
        return small - 2
    if kind in ("float", "double"):
        return (small - 3) / 2
    if kind.startswith("decimal"):
        precision, scale = decimal_digits(kind)
        digits = max(1, min(precision, 6))
        return Decimal(generator.randrange(-(10**digits) + 1, 10**digits)).scaleb(-scale)
    if kind == "boolean":
        return small % 2 == 0
    if kind == "date":
        return date(2013, 1, 1) + timedelta(days=small)
    if kind.startswith("timestamp"):
        zone = None if kind == "timestamp_ntz" else UTC
        return datetime(2013, 1, 1, tzinfo=zone) + timedelta(hours=small)
    if kind == "binary":
        return bytes([small])
    if kind == "string" or kind.startswith(("varchar", "char")):
        return "abcdefgh"[small]
    raise InvalidUsage(f"--! random does not make values of type {kind}")

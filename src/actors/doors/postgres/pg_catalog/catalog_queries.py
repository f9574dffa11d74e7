"""Answers to catalog queries: what a PostgreSQL client asks of the server about itself.

A query is one of these when all relations that it names are of `pg_catalog` or
`information_schema`, or when it names none and calls a function of the session or the catalog.
`CatalogQueries` is synchronous and touches no socket: the door asks `is_catalog_query`, then
`describe_catalog_query` (for Describe) and `answer_catalog_query`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

import msgspec
from sqlglot import exp

from actors.doors.postgres.pg_catalog.catalog_database import CatalogDatabase
from actors.doors.postgres.pg_catalog.catalog_errors import (
    INVALID_TEXT,
    NOT_SUPPORTED,
    UNDEFINED_PARAMETER,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.catalog_snapshot import (
    CatalogSession,
    PgCatalogSnapshot,
    SessionSignal,
)
from actors.doors.postgres.pg_catalog.function_calls import is_session_function
from actors.doors.postgres.pg_catalog.pg_types import (
    ELEMENT_OF,
    INTEGERS,
    REGISTERED,
    TEXTUAL,
    ObjectReference,
)
from actors.doors.postgres.pg_catalog.query_scope import RelationColumn
from actors.doors.postgres.pg_catalog.sql_dialect import called_name, identifier_name, parse_query
from actors.doors.postgres.pg_catalog.typed_sql import array_json, read_text
from actors.model.pgwire.type_oids import BOOL, FLOAT4, FLOAT8, RECORD

COMPILED_QUERIES_MAX: Final = 512
"""Texts whose compiled form is kept: clients repeat theirs."""
_SYSTEM_SCHEMAS: Final = frozenset({"pg_catalog", "information_schema"})
_HINT: Final = re.compile(
    r"pg_|information_schema|\bcurrent_|\bsession_user\b|\bversion\s*\(|\bhas_\w+_privilege"
    r"|\binet_|\bto_reg|\btxid_|\breg\w+|\bset_config\b|_description\b|\bformat_type\b"
    r"|\bgetdatabaseencoding\b|\brow_security_active\b|\bacl|\bSELECT\s+user\b",
    re.IGNORECASE,
)
"""Matches in every catalog query: other texts are not even parsed here."""
_HINTS: Final = (
    *("pg_", "information_schema", "current_", "session_user", "version", "has_", "inet_", "reg"),
    *("txid_", "set_config", "_description", "format_type", "getdatabaseencoding"),
    *("row_security_active", "acl", "user"),
)
"""Words of which each match of `_HINT` has one."""
_QUERY: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*(?:SELECT|WITH|VALUES|TABLE)\b", re.IGNORECASE | re.DOTALL
)


class AnswerColumn(msgspec.Struct, frozen=True):
    """A column of an answer: its name and the OID of its PostgreSQL type."""

    name: str
    type: int


class CatalogDescription(msgspec.Struct, frozen=True):
    """The types that a query takes and returns, before it is run."""

    parameters: tuple[int, ...]
    """OIDs of the parameters' types, in order."""
    columns: tuple[AnswerColumn, ...]


class CatalogAnswer(msgspec.Struct, frozen=True):
    """The rows of a query."""

    columns: tuple[AnswerColumn, ...]
    rows: list[tuple[Any, ...]]
    settings: tuple[tuple[str, str | None, bool], ...] = ()
    """Settings that it changed by `set_config`: name, value (None: the default), and whether for
    its transaction alone."""
    signals: tuple[SessionSignal, ...] = ()
    """Sessions that it ends, or whose statements it cancels."""
    warnings: tuple[str, ...] = ()


class _CompiledText(msgspec.Struct, frozen=True):
    """A query text as it is run, again and again."""

    sql: str
    description: CatalogDescription
    fields: tuple[RelationColumn, ...]
    laterals: dict[str, str]


class CatalogQueries:
    """Answers the catalog queries of all sessions of one database."""

    def __init__(self) -> None:
        self._database = CatalogDatabase()
        self._database.apply_snapshot(PgCatalogSnapshot(0))
        # A compiled text depends on system relations alone, so that it outlives snapshots.
        self._compile = lru_cache(COMPILED_QUERIES_MAX)(self._compile_text)

    def apply_snapshot(self, snapshot: PgCatalogSnapshot) -> None:
        """Show this snapshot from now on. Costs nothing for the version that is shown."""
        self._database.apply_snapshot(snapshot)

    def apply_sessions(self, sessions: Sequence[CatalogSession]) -> None:
        """Show these sessions in `pg_stat_activity` from now on, beside the one that asks."""
        self._database.functions.sessions = tuple(sessions)

    @staticmethod
    def may_be_catalog_query(text: str) -> bool:
        """Return whether a text is a query that has a word that every catalog query has."""
        # The first word tells most: searching all of a long INSERT takes milliseconds.
        if _QUERY.match(text) is None:
            return False
        # Each word is looked for alone first: in a long text the pattern takes ten times as long,
        # and all threads wait for it.
        lowered = text.lower()
        return any(word in lowered for word in _HINTS) and _HINT.search(text) is not None

    def is_catalog_query(self, text: str) -> bool:
        """Return whether a statement is answered here. Text that does not parse is not."""
        if not self.may_be_catalog_query(text):
            return False
        try:
            tree = _parsed(text)
        except CatalogQueryError:
            return False
        # Statements that change something are never answered here.
        return isinstance(tree, exp.Query) and self._asks_the_catalog(tree)

    def _asks_the_catalog(self, tree: Any) -> bool:
        ctes = {identifier_name(cte.args["alias"].this) for cte in tree.find_all(exp.CTE)}
        asked = own = False
        for table in tree.find_all(exp.Table):
            # What is in them is looked at for itself.
            if isinstance(table.this, exp.Func | exp.Query | exp.Values):
                continue
            schema = identifier_name(table.args["db"]) if table.args.get("db") else ""
            name = identifier_name(table.this) if table.this is not None else ""
            if not schema and name in ctes:
                continue
            if schema not in _SYSTEM_SCHEMAS and (schema or not name.startswith("pg_")):
                return False
            # A table of a user's may have such a name; beside the catalog's it is told as unknown.
            known = bool(schema) or self._database.find_relation("", name) is not None
            asked, own = asked or known, own or not known
        if own:
            return asked
        return asked or any(_is_session_node(node) for node in tree.walk())

    def describe_catalog_query(
        self, text: str, parameter_types: Sequence[int] = ()
    ) -> CatalogDescription:
        """Return the types of a query's parameters and columns. `parameter_types` are those that
        the client gives (0: it leaves the type open). Raises `CatalogQueryError`."""
        return self._compile(text, tuple(parameter_types)).description

    def answer_catalog_query(
        self,
        text: str,
        parameters: Sequence[Any] = (),
        session: CatalogSession | None = None,
        parameter_types: Sequence[int] = (),
    ) -> CatalogAnswer:
        """Return a query's columns and rows. A parameter is a value of Python or its text.
        Raises `CatalogQueryError`, which has the SQLSTATE."""
        session = session or CatalogSession()
        compiled = self._compile(text, tuple(parameter_types))
        types = compiled.description.parameters
        # More than the query has are let pass, as PostgreSQL's drivers may send them.
        if len(parameters) < len(types):
            raise CatalogQueryError(
                f"there is no parameter ${len(parameters) + 1}", UNDEFINED_PARAMETER
            )
        # Before the parameters: a name among them is found by the session's path.
        self._database.functions.enter(session)
        bindings = {
            f"p{at}": self._bound(value, kind)
            for at, (value, kind) in enumerate(zip(parameters, types, strict=False), start=1)
        }
        rows = self._database.run(compiled.sql, bindings, compiled.laterals)
        readers = [self._reader(field) for field in compiled.fields]
        read = [
            tuple(
                None if value is None else reader(value)
                for value, reader in zip(row, readers, strict=True)
            )
            for row in rows
        ]
        called = self._database.functions
        return CatalogAnswer(
            compiled.description.columns,
            read,
            tuple(called.settings_set),
            tuple(called.signals),
            tuple(called.warnings),
        )

    def _compile_text(self, text: str, parameter_types: tuple[int, ...]) -> _CompiledText:
        given = {at: kind for at, kind in enumerate(parameter_types, start=1) if kind}
        compiler = self._database.make_compiler(given)
        try:
            sql, shape = compiler.compile_query(_parsed(text))
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            # A tree of a form that the compiler does not expect: sqlglot takes more than we do.
            raise CatalogQueryError(
                f"the catalog query cannot be compiled: {error}", NOT_SUPPORTED
            ) from error
        self._database.make_views(compiler.relations)
        description = CatalogDescription(
            compiler.parameters.all_types(),
            tuple(AnswerColumn(column.name, column.type) for column in shape.columns),
        )
        return _CompiledText(sql, description, shape.columns, compiler.laterals)

    # -- values --------------------------------------------------------------------------------

    def _bound(self, value: Any, kind: int) -> Any:
        """Return a parameter's value as SQLite holds one of its type."""
        if isinstance(value, bytes):
            value = value.decode()
        # Before numbers: True is an int to Python.
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, list | tuple):
            return array_json(value)
        if isinstance(value, datetime | date):
            value = value.isoformat(sep=" ") if isinstance(value, datetime) else value.isoformat()
        elif isinstance(value, Decimal):
            value = str(value)
        if not isinstance(value, str):
            return value
        if kind in REGISTERED:
            lookups = self._database.functions.lookups
            found = lookups.find_registered(kind, value)
            if found is None:
                raise lookups.missing_error(kind, value)
            return found
        return read_text(value, kind)

    def _reader(self, field: RelationColumn) -> Any:
        """Return the function that makes a value of Python of what SQLite holds."""
        kind = field.type
        if kind == BOOL:
            return bool
        if kind in REGISTERED:
            return lambda value: self._reference(kind, value)
        if kind in ELEMENT_OF:
            return lambda value: self._read_array(value, ELEMENT_OF[kind])
        # Texts of numbers come from casts that SQLite leaves as they are.
        if kind in INTEGERS:
            return int
        if kind in (FLOAT4, FLOAT8):
            return float
        if kind == RECORD and field.fields:
            return _record_text
        return str if kind in TEXTUAL else _unchanged

    def _reference(self, kind: int, value: Any) -> ObjectReference:
        oid = int(value)
        return ObjectReference(self._database.functions.lookups.registered_name(kind, oid), oid)

    def _read_array(self, value: str, element: int) -> list[Any]:
        held = json.loads(value)
        if not isinstance(held, list):
            raise CatalogQueryError(f"malformed array {value!r}", INVALID_TEXT)
        if element == BOOL:
            return [None if each is None else bool(each) for each in held]
        if element in REGISTERED:
            return [None if each is None else self._reference(element, each) for each in held]
        # An array of arrays is held as a text within the text.
        return [
            json.loads(each) if isinstance(each, str) and element in ELEMENT_OF else each
            for each in held
        ]


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    # SQL is parsed in Python: that is most of an answer's time.
    # Kept from one question to the next: the door asks what it is, then for its answer.
    return parse_query(text)


def _is_session_node(node: Any) -> bool:
    """Return whether a node asks the server about itself."""
    if isinstance(node, exp.Anonymous):
        return is_session_function(called_name(node))
    if isinstance(node, exp.Column):
        # USER without quotes is a function; nothing else has that name without a FROM.
        unquoted = isinstance(node.this, exp.Identifier) and not node.this.args.get("quoted")
        return unquoted and not node.args.get("table") and identifier_name(node.this) == "user"
    if isinstance(node, exp.DataType):
        return str(node.args.get("kind") or "").startswith("reg")
    return False


def _record_text(value: str) -> str:
    """Return a composite as PostgreSQL writes it."""
    fields: Mapping[str, Any] = json.loads(value)
    return "(" + ",".join("" if each is None else str(each) for each in fields.values()) + ")"


def _unchanged(value: Any) -> Any:
    return value

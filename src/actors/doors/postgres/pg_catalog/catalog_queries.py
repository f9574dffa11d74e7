"""Answers catalog queries, in which a PostgreSQL client asks the server about itself.

A catalog query reads only relations of `pg_catalog` or `information_schema`, or it reads none and
calls a function of the session or the catalog. `CatalogQueries` is synchronous and does no I/O. The
connection calls `is_catalog_query`, then `describe_catalog_query` (for Describe) and
`answer_catalog_query`.
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
"""Number of compiled queries that are cached: clients repeat their queries."""
_SYSTEM_SCHEMAS: Final = frozenset({"pg_catalog", "information_schema"})
_HINT: Final = re.compile(
    r"pg_|information_schema|\bcurrent_|\bsession_user\b|\bversion\s*\(|\bhas_\w+_privilege"
    r"|\binet_|\bto_reg|\btxid_|\breg\w+|\bset_config\b|_description\b|\bformat_type\b"
    r"|\bgetdatabaseencoding\b|\brow_security_active\b|\bacl|\bSELECT\s+user\b",
    re.IGNORECASE,
)
"""Matches in every catalog query. Other texts are not parsed here."""
_HINTS: Final = (
    *("pg_", "information_schema", "current_", "session_user", "version", "has_", "inet_", "reg"),
    *("txid_", "set_config", "_description", "format_type", "getdatabaseencoding"),
    *("row_security_active", "acl", "user"),
)
"""Words, one of which occurs in every match of `_HINT`."""
_QUERY: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*(?:SELECT|WITH|VALUES|TABLE)\b", re.IGNORECASE | re.DOTALL
)


class AnswerColumn(msgspec.Struct, frozen=True):
    """A column of an answer. `type` is the OID of its PostgreSQL type."""

    name: str
    type: int


class CatalogDescription(msgspec.Struct, frozen=True):
    """The types of a query's parameters and columns."""

    parameters: tuple[int, ...]
    """The type OIDs of the parameters, in order."""
    columns: tuple[AnswerColumn, ...]


class CatalogAnswer(msgspec.Struct, frozen=True):
    """The rows of a query, and its effects for the connection to apply."""

    columns: tuple[AnswerColumn, ...]
    rows: list[tuple[Any, ...]]
    settings: tuple[tuple[str, str | None, bool], ...] = ()
    """Settings changed by `set_config`: name, value (None: the default), and whether only for the
    transaction."""
    signals: tuple[SessionSignal, ...] = ()
    """Sessions to end, or whose statements to cancel."""
    warnings: tuple[str, ...] = ()


class _CompiledText(msgspec.Struct, frozen=True):
    """A compiled query, which is cached."""

    sql: str
    description: CatalogDescription
    fields: tuple[RelationColumn, ...]
    laterals: dict[str, str]


class CatalogQueries:
    """Answers the catalog queries of all sessions."""

    def __init__(self) -> None:
        self._database = CatalogDatabase()
        self._database.apply_snapshot(PgCatalogSnapshot(0))
        # A compiled query depends only on system relations, so it stays valid for later snapshots.
        self._compile = lru_cache(COMPILED_QUERIES_MAX)(self._compile_text)

    def apply_snapshot(self, snapshot: PgCatalogSnapshot) -> None:
        """Show this snapshot from now on. Does nothing if it is the current version."""
        self._database.apply_snapshot(snapshot)

    def apply_sessions(self, sessions: Sequence[CatalogSession]) -> None:
        """Show these sessions in `pg_stat_activity`, in addition to the asking one."""
        self._database.functions.sessions = tuple(sessions)

    @staticmethod
    def may_be_catalog_query(text: str) -> bool:
        """Return whether a text may be a catalog query, by a quick search for typical words."""
        # Check the first word first: searching all of a long INSERT takes milliseconds.
        if _QUERY.match(text) is None:
            return False
        # Search for plain words first. In a long text the pattern takes ten times as long, during
        # which it blocks all threads.
        lowered = text.lower()
        return any(word in lowered for word in _HINTS) and _HINT.search(text) is not None

    def is_catalog_query(self, text: str) -> bool:
        """Return whether a statement is a catalog query. A text that does not parse is not."""
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
            # The walk visits their inner tables separately.
            if isinstance(table.this, exp.Func | exp.Query | exp.Values):
                continue
            schema = identifier_name(table.args["db"]) if table.args.get("db") else ""
            name = identifier_name(table.this) if table.this is not None else ""
            if not schema and name in ctes:
                continue
            if schema not in _SYSTEM_SCHEMAS and (schema or not name.startswith("pg_")):
                return False
            # A user's table may have such a name. Next to catalog relations it is reported as
            # unknown.
            known = bool(schema) or self._database.find_relation("", name) is not None
            asked, own = asked or known, own or not known
        if own:
            return asked
        return asked or any(_is_session_node(node) for node in tree.walk())

    def describe_catalog_query(
        self, text: str, parameter_types: Sequence[int] = ()
    ) -> CatalogDescription:
        """Return the types of a query's parameters and columns.

        `parameter_types` are those that the client specified (0: unspecified). Raises
        `CatalogQueryError`.
        """
        return self._compile(text, tuple(parameter_types)).description

    def answer_catalog_query(
        self,
        text: str,
        parameters: Sequence[Any] = (),
        session: CatalogSession | None = None,
        parameter_types: Sequence[int] = (),
    ) -> CatalogAnswer:
        """Run a query and return its columns and rows. A parameter is a Python value or its text.
        Raises `CatalogQueryError`, with an SQLSTATE."""
        session = session or CatalogSession()
        compiled = self._compile(text, tuple(parameter_types))
        types = compiled.description.parameters
        # Accept superfluous parameters, which drivers may send.
        if len(parameters) < len(types):
            raise CatalogQueryError(
                f"there is no parameter ${len(parameters) + 1}", UNDEFINED_PARAMETER
            )
        # Enter the session first: names in parameters are resolved in its search path.
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
            # sqlglot accepts more than this compiler, which did not expect this syntax tree.
            raise CatalogQueryError(
                f"cannot compile the catalog query: {error}", NOT_SUPPORTED
            ) from error
        self._database.make_views(compiler.relations)
        description = CatalogDescription(
            compiler.parameters.all_types(),
            tuple(AnswerColumn(column.name, column.type) for column in shape.columns),
        )
        return _CompiledText(sql, description, shape.columns, compiler.laterals)

    # -- values --------------------------------------------------------------------------------

    def _bound(self, value: Any, kind: int) -> Any:
        """Convert a parameter's value to the form in which SQLite stores its type."""
        if isinstance(value, bytes):
            value = value.decode()
        # Before numbers, because bool is a subclass of int.
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
        """Return the function that converts a column's values from SQLite to Python."""
        kind = field.type
        if kind == BOOL:
            return bool
        if kind in REGISTERED:
            return lambda value: self._reference(kind, value)
        if kind in ELEMENT_OF:
            return lambda value: self._read_array(value, ELEMENT_OF[kind])
        # Some casts leave numbers as text.
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
            raise CatalogQueryError(f"invalid array {value!r}", INVALID_TEXT)
        if element == BOOL:
            return [None if each is None else bool(each) for each in held]
        if element in REGISTERED:
            return [None if each is None else self._reference(element, each) for each in held]
        # An inner array is stored as JSON text within the JSON.
        return [
            json.loads(each) if isinstance(each, str) and element in ELEMENT_OF else each
            for each in held
        ]


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    # Cached, because parsing takes most of the time of an answer, and the connection first asks
    # what kind of query it is, then for its answer.
    return parse_query(text)


def _is_session_node(node: Any) -> bool:
    """Return whether a syntax node asks the server about itself."""
    if isinstance(node, exp.Anonymous):
        return is_session_function(called_name(node))
    if isinstance(node, exp.Column):
        # Unquoted USER is a function. Without FROM there is no column of this name.
        unquoted = isinstance(node.this, exp.Identifier) and not node.this.args.get("quoted")
        return unquoted and not node.args.get("table") and identifier_name(node.this) == "user"
    if isinstance(node, exp.DataType):
        return str(node.args.get("kind") or "").startswith("reg")
    return False


def _record_text(value: str) -> str:
    """Format a composite value as PostgreSQL does."""
    fields: Mapping[str, Any] = json.loads(value)
    return "(" + ",".join("" if each is None else str(each) for each in fields.values()) + ")"


def _unchanged(value: Any) -> Any:
    return value

"""The statements of SQL as frozen structs: what a user wrote, before any name is resolved.

`position` is the offset of a statement's first word in the text. A query or expression is a
`TextSpan`: its tokens, with their offsets. Code that reads a span uses its tokens, so a text is
lexed only once; Spark gets its text. Positions that Spark reports count from `TextSpan.start`.

A name is a tuple of its parts as written; in PostgreSQL's dialect unquoted parts are in lower case.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from actors.engine.sql.tokens import LexedText, SqlDialect, SqlToken, lex_text, match_brackets
from actors.model.protocol.api import CatalogStatement
from actors.model.protocol.role_messages import RoleStatement
from actors.runtime.errors import InvalidUsage, PenstockError

T = TypeVar("T")
QualifiedName: TypeAlias = tuple[str, ...]
ObjectKind: TypeAlias = Literal["table", "view", "materialized view", "source", "sink", "index"]
RefreshPolicy: TypeAlias = Literal["auto", "incremental", "incremental strict", "full"]
SECRET_SHOWN: Final = "***"
"""Text shown in place of a secret."""


class TextSpan(msgspec.Struct, frozen=True, gc=False):
    """A part of a statement: the tokens `[first, last)` of its text. `written` False: the service
    generated the text, so no statement contains it."""

    lexed: LexedText
    first: int
    last: int
    written: bool = True

    @property
    def start(self) -> int:
        """Return the offset of the part's first token in the statement."""
        return self.lexed.tokens[self.first].start if self.first < self.last else self.end

    @property
    def end(self) -> int:
        """Return the offset after the part's last token."""
        return self.lexed.tokens[self.last - 1].end if self.last else 0

    @property
    def text(self) -> str:
        """Return the text of the part as written."""
        return self.lexed.text[self.start : self.end]

    @property
    def tokens(self) -> Sequence[SqlToken]:
        """Return the tokens of the part; their offsets count in the statement."""
        return self.lexed.tokens[self.first : self.last]

    def as_text(self) -> LexedText:
        """Return the part as a text of its own, with offsets that count from its start."""
        return self.lexed.part(self.first, self.last)

    def without(self, parts: Sequence[TextSpan]) -> TextSpan:
        """Return the part with some of its parts replaced by blanks, so that all later offsets stay
        the same."""
        text, last, tokens = self.lexed.text, self.last, list(self.lexed.tokens)
        # From the end backwards, so that earlier places stay valid.
        for each in sorted(parts, key=lambda part: part.first, reverse=True):
            text = text[: each.start] + " " * (each.end - each.start) + text[each.end :]
            last -= each.last - each.first
            del tokens[each.first : each.last]
        lexed = LexedText(text, self.lexed.dialect, tokens, {})
        return TextSpan(lexed, self.first, last, self.written).matched() if parts else self

    def matched(self) -> TextSpan:
        """Return the part with its brackets matched. Raises `SqlSyntaxError`."""
        whole = self.lexed
        partners = match_brackets(whole.text, whole.tokens, self.first, self.last)
        lexed = LexedText(whole.text, whole.dialect, whole.tokens, partners)
        return TextSpan(lexed, self.first, self.last, self.written)

    def end_span(self) -> TextSpan:
        """Return the empty part just after this one."""
        return TextSpan(self.lexed, self.last, self.last, self.written)

    def place_of(self, offset: int) -> int | None:
        """Return the offset in the statement of an offset in `text`; None for generated text."""
        return self.start + offset if self.written else None


def generated_span(dialect: SqlDialect, text: str) -> TextSpan:
    """Return a text that the service generated as a span. Raises `SqlSyntaxError`.

    >>> generated_span(SqlDialect.SPARK, "SELECT  1").place_of(3)
    """
    lexed = lex_text(text, dialect)
    return TextSpan(lexed, 0, len(lexed.tokens), written=False)


class SecretSpan(msgspec.Struct, frozen=True):
    """A secret: its value, and the offsets that a log must redact."""

    start: int
    end: int
    value: str

    def __repr__(self) -> str:
        """Return a text without the secret."""
        return f"SecretSpan(start={self.start}, end={self.end}, value={SECRET_SHOWN})"


class SqlStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A statement that starts at the offset `position`."""

    position: int


def parts_in(value: object, kind: type[T]) -> Iterator[T]:
    """Yield all instances of a class within a statement, or within a value in one."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from parts_in(each, kind)
    elif isinstance(value, msgspec.Struct) and not isinstance(value, TextSpan):
        for name in value.__struct_fields__:
            yield from parts_in(getattr(value, name), kind)


class ReadingStatement(SqlStatement, frozen=True, kw_only=True):
    """A statement that changes nothing, so a read-only transaction allows it. A statement run by
    EXECUTE is checked when it runs. As in PostgreSQL, VACUUM counts as one: it changes storage, not
    contents."""


class ShowingStatement(ReadingStatement, frozen=True, kw_only=True):
    """A statement that lists things: it returns rows, whose columns are known only when it runs."""


# -- changes of objects and roles ----------------------------------------------------------------


class ChangeStatement(SqlStatement, frozen=True, kw_only=True):
    """A statement that changes objects or roles: the requests that carry it out, and the parts that
    only a session can complete."""

    command: str
    """Its command, such as ``CREATE TABLE``."""
    requests: tuple[CatalogStatement | RoleStatement, ...] = ()
    """The requests: one, or for a DROP one for each name. They have number 0 until a client sends
    them."""
    refused: str = ""
    """Why the service cannot carry it out, if that is already known; `requests` is then empty."""
    names: tuple[QualifiedName, ...] = ()
    """The objects or roles that it names, as written."""
    kind: ObjectKind | None = None
    """Kind of the existing objects that it names; None if it names none, or only roles."""
    skipped: tuple[type[PenstockError], ...] = ()
    """Errors that IF EXISTS or IF NOT EXISTS turns into a notice."""
    query: TextSpan | None = None
    """Query of a view, for `CreateView.sql`."""
    defaults: Mapping[str, TextSpan | None] = {}
    """Expressions of DEFAULT by column, for `column_defaults`; None drops the default."""
    only_new_columns: bool = False
    """True to skip columns that already exist (ADD COLUMN IF NOT EXISTS)."""
    password: SecretSpan | None = None
    """New password of a role, for `verifier`."""


def change_statement(
    requests: Callable[[], tuple[CatalogStatement | RoleStatement, ...]], **fields: Any
) -> ChangeStatement:
    """Return a statement with the requests that a function makes. An unknown schema or property is
    reported only when the statement runs, since the text may turn out to be Spark's."""
    try:
        return ChangeStatement(requests=requests(), **fields)
    except InvalidUsage as error:
        return ChangeStatement(refused=str(error), **fields)


class CreateTableAsStatement(SqlStatement, frozen=True, kw_only=True):
    """``CREATE TABLE name AS query``. The columns of `created` are those of the query."""

    created: ChangeStatement
    query: QueryStatement

    @property
    def names(self) -> tuple[QualifiedName, ...]:
        """Return the name of the table."""
        return self.created.names


# -- listings of objects -------------------------------------------------------------------------

ShownKind: TypeAlias = Literal[
    "tables", "views", "materialized views", "sources", "sinks", "indexes", "schemas"
]


class ShowObjectsStatement(ShowingStatement, frozen=True, kw_only=True):
    """``SHOW TABLES`` and similar statements. `schema` empty: the current one."""

    kind: ShownKind
    schema: QualifiedName = ()
    object: QualifiedName = ()
    """Object whose indexes are listed; empty: all objects."""
    pattern: str | None = None
    """Pattern of LIKE, as written."""
    extended: bool = False
    """True for ``SHOW TABLE EXTENDED``."""


class ShowColumnsStatement(ShowingStatement, frozen=True, kw_only=True):
    """``SHOW COLUMNS FROM object``."""

    object: QualifiedName


class ShowCreateStatement(ShowingStatement, frozen=True, kw_only=True):
    """``SHOW CREATE kind name``."""

    kind: ObjectKind
    name: QualifiedName


class ShowSettingStatement(ShowingStatement, frozen=True, kw_only=True):
    """``SHOW setting``, and ``SET setting`` in Spark's dialect; ``all`` for all settings."""

    name: str


class QueryPin(msgspec.Struct, frozen=True, kw_only=True):
    """A relation with its own time within a query: ``name TIMESTAMP AS OF expression``.

    `position` is the offset of the name. The clause stays in the query's text, at `clause`.
    """

    position: int
    name: QualifiedName
    is_version: bool
    """True for ``VERSION AS OF``."""
    expression: TextSpan
    clause: TextSpan


class QueryStatement(ReadingStatement, frozen=True, kw_only=True):
    """A query. `query` is its text without a trailing ``AS OF``, which applies to the whole
    query."""

    query: TextSpan
    as_of: TextSpan | None = None
    pins: tuple[QueryPin, ...] = ()


class SubscribeStatement(ReadingStatement, frozen=True, kw_only=True):
    """``SUBSCRIBE`` to a query, or to an object by its name."""

    query: TextSpan | None = None
    name: QualifiedName | None = None
    snapshot: bool = True
    progress: bool = False
    as_of: TextSpan | None = None
    up_to: TextSpan | None = None


class DescribeStatement(ShowingStatement, frozen=True, kw_only=True):
    """``DESCRIBE`` of an object or a query."""

    name: QualifiedName | None = None
    query: QueryStatement | None = None
    extended: bool = False


ExplainMode: TypeAlias = Literal["plain", "incremental", "analyze"]


class ExplainStatement(ShowingStatement, frozen=True, kw_only=True):
    """``EXPLAIN`` of a query, of a materialized view before it is created, or of an existing one.

    Either `statement` or `view` is set.
    """

    mode: ExplainMode
    statement: QueryStatement | ChangeStatement | None = None
    view: QualifiedName = ()
    """Name of an existing materialized view."""


# -- changes of rows -----------------------------------------------------------------------------


class ColumnAssignment(msgspec.Struct, frozen=True):
    """``column = value``; the column may be qualified by an alias."""

    column: QualifiedName
    value: TextSpan


class ConflictClause(msgspec.Struct, frozen=True, kw_only=True):
    """``ON CONFLICT (columns) DO UPDATE SET … WHERE condition``; without assignments DO NOTHING."""

    position: int
    columns: tuple[str, ...] = ()
    assignments: tuple[ColumnAssignment, ...] = ()
    condition: TextSpan | None = None


class InsertStatement(SqlStatement, frozen=True, kw_only=True):
    """``INSERT INTO table``: rows of expressions, a query, or a single row of DEFAULT VALUES.
    `returning`: expressions over each written row; empty if the statement returns no rows."""

    table: QualifiedName
    alias: str | None = None
    columns: tuple[str, ...] | None = None
    rows: tuple[tuple[TextSpan, ...], ...] | None = None
    query: QueryStatement | None = None
    conflict: ConflictClause | None = None
    returning: tuple[TextSpan, ...] = ()
    default_values: bool = False


class UpdateStatement(SqlStatement, frozen=True, kw_only=True):
    """``UPDATE table SET assignments WHERE condition``; `returning` as in `InsertStatement`."""

    table: QualifiedName
    assignments: tuple[ColumnAssignment, ...]
    alias: str | None = None
    where: TextSpan | None = None
    returning: tuple[TextSpan, ...] = ()


class RefreshViewStatement(SqlStatement, frozen=True, kw_only=True):
    """``REFRESH MATERIALIZED VIEW``."""

    name: QualifiedName


class MaintainStatement(ReadingStatement, frozen=True, kw_only=True):
    """``VACUUM`` or ``ANALYZE``, which do nothing: the service maintains its storage itself."""

    verb: str


class DeleteStatement(SqlStatement, frozen=True, kw_only=True):
    """``DELETE FROM table WHERE condition``, or ``TRUNCATE table``; `returning`: expressions over
    each removed row."""

    table: QualifiedName
    alias: str | None = None
    where: TextSpan | None = None
    truncates: bool = False
    returning: tuple[TextSpan, ...] = ()


MergeMatch: TypeAlias = Literal["matched", "not matched", "not matched by source"]
MergeVerb: TypeAlias = Literal[
    "update", "update all", "delete", "insert", "insert all", "insert given", "nothing"
]


class MergeClause(msgspec.Struct, frozen=True, kw_only=True):
    """``WHEN match AND condition THEN action``. Empty `columns` in an INSERT: all columns, in
    order.

    ``insert given`` is used for ON CONFLICT: `columns` take the values of the source columns of the
    same names, and all others their defaults.
    """

    position: int
    match: MergeMatch
    action: MergeVerb
    condition: TextSpan | None = None
    assignments: tuple[ColumnAssignment, ...] = ()
    columns: tuple[str, ...] = ()
    values: tuple[TextSpan, ...] = ()


class WrittenRows(msgspec.Struct, frozen=True):
    """Rows of expressions with names for their columns: ``VALUES (…), (…) AS v(names)``."""

    names: tuple[str, ...]
    rows: tuple[tuple[TextSpan, ...], ...]


class MergeStatement(SqlStatement, frozen=True, kw_only=True):
    """``MERGE INTO table USING source ON condition`` and its clauses.

    The source is an object, or a query in brackets (its text without them). `source_rows`: the rows
    of a query that consists only of rows. The source of an ON CONFLICT may also be rows alone, or a
    query whose columns are named `source_columns`. `on` None: the columns of the PRIMARY KEY are
    equal.
    """

    table: QualifiedName
    on: TextSpan | None
    clauses: tuple[MergeClause, ...]
    alias: str | None = None
    source_name: QualifiedName | None = None
    source_query: QueryStatement | None = None
    source_columns: tuple[str, ...] = ()
    source_rows: WrittenRows | None = None
    source_alias: str | None = None


CopyFormat: TypeAlias = Literal["text", "csv", "binary"]


class CopyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The format of the data of a COPY, including the defaults of the format."""

    format: CopyFormat = "text"
    delimiter: str = "\t"
    null: str = "\\N"
    header: bool = False
    header_match: bool = False
    """True if the names in the header must match those of the columns (``HEADER MATCH``)."""
    quote: str = '"'
    escape: str = '"'


class CopyStatement(SqlStatement, frozen=True, kw_only=True):
    """``COPY`` of a table from STDIN, or of a table, query or SUBSCRIBE to STDOUT."""

    direction: Literal["from", "to"]
    table: QualifiedName | None = None
    columns: tuple[str, ...] | None = None
    source: QueryStatement | SubscribeStatement | None = None
    options: CopyOptions = CopyOptions()


# -- transactions --------------------------------------------------------------------------------


class TransactionModes(msgspec.Struct, frozen=True, kw_only=True):
    """The modes of a transaction; None for those that are not given."""

    isolation: str | None = None
    """The isolation level in lower case, such as ``read committed``."""
    read_only: bool | None = None


class BeginStatement(ReadingStatement, frozen=True, kw_only=True):
    """``BEGIN``, ``START TRANSACTION``."""

    modes: TransactionModes = TransactionModes()


class SetTransactionStatement(ReadingStatement, frozen=True, kw_only=True):
    """``SET TRANSACTION``; if `session`, the modes also apply to later transactions."""

    modes: TransactionModes
    session: bool = False


class CommitStatement(ReadingStatement, frozen=True, kw_only=True):
    """``COMMIT``, ``END``."""


class RollbackStatement(ReadingStatement, frozen=True, kw_only=True):
    """``ROLLBACK``, ``ABORT``."""


class SavepointStatement(ReadingStatement, frozen=True, kw_only=True):
    """``SAVEPOINT name``."""

    name: str


class ReleaseSavepointStatement(ReadingStatement, frozen=True, kw_only=True):
    """``RELEASE SAVEPOINT name``."""

    name: str


class RollbackToStatement(ReadingStatement, frozen=True, kw_only=True):
    """``ROLLBACK TO SAVEPOINT name``."""

    name: str


# -- the session ---------------------------------------------------------------------------------


class SetVariableStatement(ReadingStatement, frozen=True, kw_only=True):
    """``SET name = values``; no values mean DEFAULT. TIME ZONE is the setting ``timezone``."""

    name: str
    values: tuple[str, ...]
    local: bool = False


class ResetVariableStatement(ReadingStatement, frozen=True, kw_only=True):
    """``RESET name``; None for ALL."""

    name: str | None


class UseSchemaStatement(ReadingStatement, frozen=True, kw_only=True):
    """``USE schema``."""

    name: QualifiedName


class DeclareCursorStatement(ReadingStatement, frozen=True, kw_only=True):
    """``DECLARE name CURSOR FOR source``."""

    name: str
    source: QueryStatement | SubscribeStatement
    hold: bool = False
    binary: bool = False


class FetchCursorStatement(ReadingStatement, frozen=True, kw_only=True):
    """``FETCH count FROM name``, forward; None for ALL. `move`: the rows are skipped (MOVE)."""

    name: str
    count: int | None = 1
    move: bool = False


class CloseCursorStatement(ReadingStatement, frozen=True, kw_only=True):
    """``CLOSE name``; None for ALL."""

    name: str | None


class PrepareTextStatement(ReadingStatement, frozen=True, kw_only=True):
    """``PREPARE name (types) AS statement``; `types` are Spark's."""

    name: str
    statement: TextSpan
    types: tuple[str, ...] = ()


class ExecutePreparedStatement(ReadingStatement, frozen=True, kw_only=True):
    """``EXECUTE name (arguments)``."""

    name: str
    arguments: tuple[TextSpan, ...] = ()


class DeallocateStatement(ReadingStatement, frozen=True, kw_only=True):
    """``DEALLOCATE name``; None for ALL."""

    name: str | None


class DiscardAllStatement(ReadingStatement, frozen=True, kw_only=True):
    """``DISCARD ALL``."""


class NoOperationStatement(ReadingStatement, frozen=True, kw_only=True):
    """A statement that is accepted and does nothing. `tag` is its command tag, such as
    ``LISTEN``."""

    tag: str


# -- roles ---------------------------------------------------------------------------------------


class CreateTokenStatement(SqlStatement, frozen=True, kw_only=True):
    """``CREATE TOKEN FOR ROLE name``: a token with which the role proves itself over Spark
    Connect."""

    role: str


class ShowRolesStatement(ShowingStatement, frozen=True, kw_only=True):
    """``SHOW ROLES``."""


class ShowGrantsStatement(ShowingStatement, frozen=True, kw_only=True):
    """``SHOW GRANTS ON object FOR role``; both clauses are optional."""

    object: QualifiedName = ()
    role: str | None = None

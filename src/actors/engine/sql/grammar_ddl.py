"""Grammar of definitions: CREATE, ALTER, DROP, COMMENT ON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from actors.engine.sql.grammar_query import read_as_query, read_query, refuse_queries
from actors.engine.sql.grammar_roles import (
    read_alter_role,
    read_create_role,
    read_create_token,
    read_drop_roles,
    read_drop_tokens,
)
from actors.engine.sql.reader import NO_NAMES, StatementReader, list_words
from actors.engine.sql.statements import (
    AddColumnsAction,
    AddTablesAction,
    AlterAction,
    AlterObjectStatement,
    ColumnDefinition,
    CommentOnStatement,
    CreateIndexStatement,
    CreateMaterializedViewStatement,
    CreateSinkStatement,
    CreateSourceStatement,
    CreateTableAsStatement,
    CreateTableStatement,
    CreateViewStatement,
    DropObjectsStatement,
    MaintainStatement,
    ObjectKind,
    QualifiedName,
    RefreshPolicy,
    RefreshViewStatement,
    RenameAction,
    SetDefaultAction,
    SetPolicyAction,
    SetPropertiesAction,
    SourceTableName,
    SqlStatement,
    TextSpan,
    UnsetPropertiesAction,
)
from actors.engine.sql.tokens import SqlDialect
from actors.engine.sql.type_names import read_written_type
from actors.model.plan.schema import arrow_type
from actors.runtime.errors import InvalidUsage

KINDS: Final[Mapping[tuple[str, ...], ObjectKind]] = {
    ("MATERIALIZED", "VIEW"): "materialized view",
    ("TABLE",): "table",
    ("VIEW",): "view",
    ("SOURCE",): "source",
    ("SINK",): "sink",
    ("INDEX",): "index",
}
"""Words of each kind of object."""
_KIND_WORDS: Final = tuple(" ".join(words) for words in KINDS)
_POLICIES: Final[Mapping[tuple[str, ...], RefreshPolicy]] = {
    ("AUTO",): "auto",
    ("INCREMENTAL", "STRICT"): "incremental strict",
    ("INCREMENTAL",): "incremental",
    ("FULL",): "full",
}
_TEMPORARY: Final = ("TEMPORARY", "TEMP", "GLOBAL", "LOCAL", "UNLOGGED")
_FORMAT_HINT: Final = (
    "a table of this service has no format, place or partitions of its own; files and other"
    " systems are read by CREATE SOURCE"
)


def need_materialized_view(reader: StatementReader) -> None:
    """Raise `SqlSyntaxError` if MATERIALIZED comes next without VIEW."""
    if reader.follows("MATERIALIZED") and not reader.follows("MATERIALIZED", "VIEW"):
        reader.need("MATERIALIZED", "VIEW")


def read_kind(reader: StatementReader) -> ObjectKind:
    """Take the words of a kind of object."""
    need_materialized_view(reader)
    for words, kind in KINDS.items():
        if reader.take(*words):
            return kind
    raise reader.unexpected(list_words(_KIND_WORDS))


def read_refresh(reader: StatementReader) -> RefreshViewStatement:
    """Take a REFRESH."""
    position = reader.position
    reader.need("REFRESH", "MATERIALIZED", "VIEW")
    reader.take("CONCURRENTLY")
    name = reader.object_name("a view's name")
    reader.refuse("WITH", "NO", problem="a view is never without data", hint="DROP it instead")
    reader.take("WITH", "DATA")
    reader.need_end()
    return RefreshViewStatement(position=position, name=name)


def read_maintain(reader: StatementReader) -> MaintainStatement:
    """Take a VACUUM or an ANALYZE, whatever its options are."""
    position = reader.position
    verb = reader.need_any("VACUUM", "ANALYZE")
    reader.place = reader.last
    return MaintainStatement(position=position, verb=verb)


# -- CREATE --------------------------------------------------------------------------------------


class _Created(NamedTuple):
    """The begin of a CREATE."""

    position: int
    or_replace: bool
    if_not_exists: bool


def read_create(reader: StatementReader) -> SqlStatement:
    """Take a CREATE."""
    position = reader.position
    reader.need("CREATE")
    or_replace = reader.take("OR", "REPLACE")
    _refuse_create(reader)
    need_materialized_view(reader)
    for words, (read, replaces) in _CREATES.items():
        if not reader.take(*words):
            continue
        # PostgreSQL's order of words, and Spark's: IF NOT EXISTS is behind the kind.
        if or_replace and not replaces:
            kind = " ".join(words)
            raise reader.error(
                f"a {kind} cannot be replaced", hint=f"drop it, or write CREATE {kind}"
            )
        # PostgreSQL's word: an index is always built beside the writers here.
        if words == ("INDEX",):
            reader.take("CONCURRENTLY")
        if_not_exists = reader.take("IF", "NOT", "EXISTS")
        if or_replace and if_not_exists:
            raise reader.error("OR REPLACE and IF NOT EXISTS exclude each other")
        return read(reader, _Created(position, or_replace, if_not_exists))
    raise reader.unexpected(list_words(" ".join(words) for words in _CREATES))


def _refuse_create(reader: StatementReader) -> None:
    if reader.follows_any(*_TEMPORARY):
        raise reader.error(
            f"{reader.peek().word} objects are not kept here",
            hint="create the object without that word and drop it later, or write the query into"
            " WITH",
        )
    reader.refuse(
        "UNIQUE",
        problem="an index is not UNIQUE",
        hint="a PRIMARY KEY of the table keeps rows unique",
    )
    reader.refuse("EXTERNAL", problem="EXTERNAL tables are not kept here", hint="use CREATE SOURCE")


def _create_table(reader: StatementReader, begun: _Created) -> SqlStatement:
    name = reader.object_name("a table's name")
    # Columns, or a query that has them; which one is known behind the clauses.
    defined = None
    if reader.follows("("):
        defined = _table_elements(reader.bracketed())
    clauses = _clauses(reader, _TABLE_CLAUSES)
    if defined is None:
        if not reader.follows("AS"):
            raise reader.unexpected("'(' and columns, or AS and a query", hint=_FORMAT_HINT)
        reader.need("AS")
        return CreateTableAsStatement(
            position=begun.position,
            name=name,
            query=read_query(reader),
            if_not_exists=begun.if_not_exists,
            **clauses,
        )
    reader.refuse(
        "AS",
        problem="AS cannot follow columns",
        hint="the query names the columns: CREATE TABLE name AS query",
    )
    if not reader.ends():
        raise reader.unexpected(
            "TBLPROPERTIES, COMMENT or the end of the statement", hint=_FORMAT_HINT
        )
    columns, key = defined
    return CreateTableStatement(
        position=begun.position,
        name=name,
        columns=columns,
        key=key,
        if_not_exists=begun.if_not_exists,
        **clauses,
    )


def _create_materialized_view(reader: StatementReader, begun: _Created) -> SqlStatement:
    name = reader.object_name("a view's name")
    _refuse_view_columns(reader)
    clauses = _clauses(reader, _MATERIALIZED_CLAUSES)
    query = read_as_query(reader, "REFRESH POLICY, COMMENT, TBLPROPERTIES or AS and a query")
    return CreateMaterializedViewStatement(
        position=begun.position,
        name=name,
        query=query,
        or_replace=begun.or_replace,
        if_not_exists=begun.if_not_exists,
        **clauses,
    )


def _create_view(reader: StatementReader, begun: _Created) -> SqlStatement:
    name = reader.object_name("a view's name")
    _refuse_view_columns(reader)
    clauses = _clauses(reader, _TABLE_CLAUSES)
    reader.refuse(
        "REFRESH",
        problem="a plain view has no REFRESH POLICY: it is read afresh each time",
        hint="write CREATE MATERIALIZED VIEW",
    )
    query = read_as_query(reader, "COMMENT, TBLPROPERTIES or AS and a query")
    return CreateViewStatement(
        position=begun.position,
        name=name,
        query=query,
        or_replace=begun.or_replace,
        if_not_exists=begun.if_not_exists,
        **clauses,
    )


def _refuse_view_columns(reader: StatementReader) -> None:
    reader.refuse(
        "(",
        problem="a view's columns are not listed",
        hint="name them in the query: SELECT expression AS name",
    )


def _create_index(reader: StatementReader, begun: _Created) -> SqlStatement:
    name = None
    if not reader.follows("ON"):
        name = reader.object_name("an index's name or ON")
    reader.need("ON")
    on = reader.object_name("a table's or view's name")
    # The one kind of PostgreSQL's that looks keys up as ours does.
    if reader.take("USING"):
        reader.need_any("BTREE", "HASH")
    columns = reader.column_names()
    reader.need_end()
    return CreateIndexStatement(
        position=begun.position,
        name=name,
        object=on,
        columns=columns,
        if_not_exists=begun.if_not_exists,
    )


def _create_source(reader: StatementReader, begun: _Created) -> SqlStatement:
    name = reader.object_name("a source's name")
    kind, options = _connector(reader)
    tables = None
    if reader.take("FOR") and not reader.take("ALL", "TABLES"):
        reader.need("TABLES")
        tables = _source_tables(reader.bracketed("'(' and tables"))
    reader.need_end("OPTIONS, FOR TABLES or the end of the statement")
    return CreateSourceStatement(
        position=begun.position,
        name=name,
        kind=kind,
        options=options,
        tables=tables,
        if_not_exists=begun.if_not_exists,
    )


def _create_sink(reader: StatementReader, begun: _Created) -> SqlStatement:
    name = reader.object_name("a sink's name")
    reader.need_any("ON", "FROM")
    on = reader.object_name("a table's or view's name")
    kind, options = _connector(reader)
    reader.need_end("OPTIONS or the end of the statement")
    return CreateSinkStatement(
        position=begun.position,
        name=name,
        object=on,
        kind=kind,
        options=options,
        if_not_exists=begun.if_not_exists,
    )


_CREATES: Final[
    Mapping[tuple[str, ...], tuple[Callable[[StatementReader, _Created], SqlStatement], bool]]
] = {
    ("TABLE",): (_create_table, False),
    ("MATERIALIZED", "VIEW"): (_create_materialized_view, True),
    ("VIEW",): (_create_view, True),
    ("SOURCE",): (_create_source, False),
    ("SINK",): (_create_sink, False),
    ("INDEX",): (_create_index, False),
    ("ROLE",): (
        lambda reader, begun: read_create_role(reader, begun.position, begun.if_not_exists),
        False,
    ),
    ("USER",): (
        lambda reader, begun: read_create_role(
            reader, begun.position, begun.if_not_exists, login=True
        ),
        False,
    ),
    ("TOKEN",): (
        lambda reader, begun: read_create_token(reader, begun.position, begun.if_not_exists),
        False,
    ),
}
"""Reader of each kind's definition, and whether OR REPLACE may stand before it."""


# -- parts of definitions ------------------------------------------------------------------------


def _clauses(
    reader: StatementReader,
    known: Mapping[tuple[str, ...], tuple[str, Callable[[StatementReader], Any]]],
) -> dict[str, Any]:
    """Take clauses in any order, each at most once; return them as fields of the statement."""
    found: dict[str, Any] = {}
    while True:
        for words, (field, read) in known.items():
            if not reader.follows(*words):
                continue
            if field in found:
                raise reader.error(f"{' '.join(words)} is given twice")
            reader.take(*words)
            found[field] = read(reader)
            break
        else:
            return found


def _policy(reader: StatementReader) -> RefreshPolicy:
    for words, policy in _POLICIES.items():
        if reader.take(*words):
            return policy
    raise reader.unexpected(list_words(" ".join(words) for words in _POLICIES))


def _comment(reader: StatementReader) -> str:
    return reader.string("a comment in single quotes")


def read_options(reader: StatementReader) -> dict[str, str]:
    """Take ``(key value, key = value, …)``; values are texts, numbers or words."""
    inner = reader.bracketed("'(' and options")
    found: dict[str, str] = {}
    while True:
        position, key = inner.position, _option_key(inner)
        if key in found:
            raise inner.error(f"the option {key} is given twice", position=position)
        inner.take("=")
        found[key] = _option_value(inner, key)
        if not inner.take(","):
            break
    inner.need_end("',' or ')'")
    return found


def _option_key(reader: StatementReader) -> str:
    if reader.peek().kind == "text":
        return reader.string()
    parts = [reader.name("an option's name")]
    while reader.take("."):
        parts.append(reader.name("a name behind the dot"))
    return ".".join(parts)


def _option_value(reader: StatementReader, key: str) -> str:
    token = reader.peek()
    if token.kind == "text":
        return reader.string()
    # The lexer has no negative numbers.
    sign = reader.take_any("-", "+")
    token = reader.peek()
    if token.kind != "number" and (sign or token.kind != "word"):
        raise reader.unexpected(f"a value of {key}", hint="a text stands in single quotes")
    reader.place += 1
    return sign.strip("+") + token.text


_TABLE_CLAUSES: Final[Mapping[tuple[str, ...], tuple[str, Callable[[StatementReader], Any]]]] = {
    ("TBLPROPERTIES",): ("properties", read_options),
    ("COMMENT",): ("comment", _comment),
}
_MATERIALIZED_CLAUSES: Final = {**_TABLE_CLAUSES, ("REFRESH", "POLICY"): ("policy", _policy)}


def _connector(reader: StatementReader) -> tuple[str, dict[str, str]]:
    """Take ``USING kind [OPTIONS (…)]``."""
    reader.need("USING")
    kind = reader.name("a kind of connector", refused=NO_NAMES).lower()
    return kind, read_options(reader) if reader.take("OPTIONS") else {}


def _source_tables(reader: StatementReader) -> tuple[SourceTableName, ...]:
    """Take ``a AS b, s.c`` to the end."""
    found = []
    while True:
        position = reader.position
        outside = reader.object_name("a table of the source")
        name: QualifiedName = ()
        if reader.take("AS"):
            name = reader.object_name("a name for the table")
        found.append(SourceTableName(position=position, outside=outside, name=name))
        if not reader.take(","):
            break
    reader.need_end("AS, ',' or ')'")
    return tuple(found)


# -- columns -------------------------------------------------------------------------------------

_REFUSED_CONSTRAINTS: Final = {
    "GENERATED": "columns are not GENERATED",
    "UNIQUE": "UNIQUE is not kept; a table has one PRIMARY KEY",
    "CHECK": "CHECK is not kept",
    "REFERENCES": "foreign keys are not kept",
    "FOREIGN": "foreign keys are not kept",
    "COLLATE": "columns have no COLLATE",
}


class _ColumnList:
    """Columns that were read; no two have the same name in another case."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Each column's name by itself in lower case."""
        self._columns: list[ColumnDefinition] = []

    def add(self, reader: StatementReader, column: ColumnDefinition) -> None:
        """Add a column. Raises `SqlSyntaxError` if its name is there."""
        # Spark resolves names in any case: two such columns would be ambiguous.
        if column.name.lower() in self.names:
            problem = f"the column {column.name!r} is there twice"
            raise reader.error(problem, position=column.position)
        self.names[column.name.lower()] = column.name
        self._columns.append(column)

    def found(self) -> tuple[ColumnDefinition, ...]:
        """Return the columns in order."""
        return tuple(self._columns)


class _KeyTaken:
    """The PRIMARY KEY of a table that is read; there is at most one."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.position = 0

    def take(self, reader: StatementReader, names: tuple[str, ...], position: int) -> None:
        """Note the key. Raises `SqlSyntaxError` if there is one already, or a name stands twice."""
        if self.names:
            raise reader.error("a table has one PRIMARY KEY", position=position)
        lowered = [name.lower() for name in names]
        if len(set(lowered)) < len(lowered):
            raise reader.error("the PRIMARY KEY names a column twice", position=position)
        self.names, self.position = names, position


def _table_elements(
    reader: StatementReader,
) -> tuple[tuple[ColumnDefinition, ...], tuple[str, ...]]:
    """Take columns and the PRIMARY KEY to the end."""
    columns = _ColumnList()
    key = _KeyTaken()
    while True:
        position = reader.position
        if _begins_constraint(reader):
            # Constraints and columns may be mixed.
            _table_constraint(reader, key)
        else:
            columns.add(reader, _column(reader, key))
        if not reader.take(","):
            break
        # Else the error would be that a column needs a type.
        if reader.ends():
            raise reader.unexpected("a column")
    reader.need_end("NOT NULL, DEFAULT, PRIMARY KEY, COMMENT, ',' or ')'")
    if not columns.names:
        raise reader.error("a table needs a column", position=position)
    # When all columns are read: the key may stand before them.
    for name in key.names:
        if name.lower() not in columns.names:
            raise reader.error(
                f"the PRIMARY KEY names {name!r}, which is no column", position=key.position
            )
    return columns.found(), tuple(columns.names[name.lower()] for name in key.names)


def _begins_constraint(reader: StatementReader) -> bool:
    """Return whether a table's constraint comes next; a column may have the name ``primary``."""
    second, third = reader.peek(1).word, reader.peek(2).word
    match reader.peek().word:
        case "PRIMARY":
            return second == "KEY"
        case "CONSTRAINT":
            return third in ("PRIMARY", "UNIQUE", "CHECK", "FOREIGN")
        case "UNIQUE" | "CHECK":
            return second == "("
        case "FOREIGN":
            return second == "KEY"
    return False


def _table_constraint(reader: StatementReader, key: _KeyTaken) -> None:
    if reader.take("CONSTRAINT"):
        reader.name("a constraint's name")
    position = reader.position
    _refuse_constraint(reader)
    reader.need("PRIMARY", "KEY")
    key.take(reader, reader.column_names(), position)


def _refuse_constraint(reader: StatementReader) -> None:
    if (problem := _REFUSED_CONSTRAINTS.get(reader.peek().word)) is not None:
        raise reader.error(problem)


def _column(reader: StatementReader, key: _KeyTaken | None) -> ColumnDefinition:
    """Take a column; `key` None: there can be no PRIMARY KEY."""
    position = reader.position
    name = reader.name("a column")
    kind = _stored_type(reader)
    not_null, comment, default = False, None, None
    while True:
        at = reader.position
        _refuse_constraint(reader)
        if key is None:
            _refuse_added_default(reader)
        if reader.take("NOT", "NULL"):
            not_null = True
        elif reader.take("COMMENT"):
            comment = _comment(reader)
        elif reader.take("DEFAULT"):
            if default is not None:
                raise reader.error("a column has one DEFAULT", position=at)
            default = _default(reader)
        elif key is not None and reader.take("PRIMARY", "KEY"):
            key.take(reader, (name,), at)
        elif not reader.take("NULL"):
            break
    return ColumnDefinition(
        position=position,
        name=name,
        type=kind,
        not_null=not_null,
        comment=comment,
        default=default,
    )


def _refuse_added_default(reader: StatementReader) -> None:
    """Raise `SqlSyntaxError` for the default of a further column, unless it is NULL."""
    if reader.follows("DEFAULT") and not reader.follows("DEFAULT", "NULL"):
        raise reader.error(
            "a column is added without a DEFAULT: the rows that are there have NULL in it, since "
            "none is written anew",
            hint="add the column, then ALTER COLUMN … SET DEFAULT …; UPDATE sets it in those rows",
        )


_BEHIND_DEFAULT: Final = frozenset({"COMMENT", "PRIMARY", *_REFUSED_CONSTRAINTS, "DEFAULT"})
"""Words with which the expression of a DEFAULT ends."""


def _default(reader: StatementReader) -> TextSpan:
    """Take the expression of a DEFAULT: up to the column's end, or to its next constraint."""
    tokens, first = reader.tokens, reader.place
    while not reader.ends() and not reader.follows(","):
        token, before = tokens[reader.place], tokens[reader.place - 1]
        # An operand stands first, whatever its word is.
        begun = reader.place > first
        if begun and token.word in _BEHIND_DEFAULT:
            break
        # IS NOT NULL is an operator, and NOT NULL behind an operand the column's.
        if begun and reader.follows("NOT", "NULL") and before.word != "IS":
            break
        if token.word == "NULL" and (before.kind in ("number", "text") or before.text == ")"):
            break
        reader.place = reader.partners.get(reader.place, reader.place) + 1
    return _without_queries(reader, first)


def _without_queries(reader: StatementReader, first: int) -> TextSpan:
    """Return the tokens from `first` on as the expression of a DEFAULT."""
    if reader.place == first:
        raise reader.unexpected("an expression")
    refuse_queries(
        reader, first, problem="a DEFAULT has no queries", hint="write a constant expression"
    )
    return reader.span(first, reader.place)


def _stored_type(reader: StatementReader) -> str:
    """Take a type that a table can store."""
    position = reader.position
    written = read_written_type(reader)
    kind = written.spark
    postgres = reader.dialect is SqlDialect.POSTGRES
    if postgres and written.checked and written.name != "bytea":
        raise reader.error(
            f"a column of type {written.name} is not supported: its values would not be checked",
            position=position,
            hint="write text",
        )
    # Here and not when the table is created, as here the type has a position.
    try:
        arrow_type(kind)
    except (InvalidUsage, ValueError) as error:
        raise reader.error(str(error), position=position) from None
    return kind


# -- ALTER ---------------------------------------------------------------------------------------

_ALL_KINDS: Final = frozenset(KINDS.values())
_Reading: TypeAlias = Callable[[StatementReader], AlterAction]


def _add_columns(reader: StatementReader) -> AlterAction:
    if_not_exists = reader.take("IF", "NOT", "EXISTS")
    columns = _ColumnList()
    if reader.follows("("):
        inner = reader.bracketed()
        columns.add(inner, _column(inner, None))
        while inner.take(","):
            columns.add(inner, _column(inner, None))
        inner.need_end("NOT NULL, COMMENT, ',' or ')'")
    else:
        columns.add(reader, _column(reader, None))
        # PostgreSQL writes ADD COLUMN before each.
        while reader.take(","):
            reader.need("ADD")
            reader.take("COLUMN")
            columns.add(reader, _column(reader, None))
    return AddColumnsAction(columns.found(), if_not_exists)


def _alter_column(reader: StatementReader) -> AlterAction:
    reader.take("COLUMN")
    name = reader.name("a column")
    if reader.take("DROP", "DEFAULT"):
        return SetDefaultAction(name)
    if not reader.take("SET", "DEFAULT"):
        raise reader.unexpected("SET DEFAULT or DROP DEFAULT")
    first = reader.place
    reader.rest("an expression")
    return SetDefaultAction(name, _without_queries(reader, first))


def _add_tables(reader: StatementReader) -> AlterAction:
    if reader.follows("("):
        return AddTablesAction(_source_tables(reader.bracketed()))
    return AddTablesAction(_source_tables(reader))


def _unset_properties(reader: StatementReader) -> AlterAction:
    if_exists = reader.take("IF", "EXISTS")
    inner = reader.bracketed("'(' and names of properties")
    keys = [_option_key(inner)]
    while inner.take(","):
        keys.append(_option_key(inner))
    inner.need_end("',' or ')'")
    return UnsetPropertiesAction(tuple(keys), if_exists)


_ACTIONS: Final[Mapping[tuple[str, ...], tuple[_Reading, frozenset[str]]]] = {
    ("SET", "REFRESH", "POLICY"): (
        lambda reader: SetPolicyAction(_policy(reader)),
        frozenset({"view", "materialized view"}),
    ),
    ("SET", "TBLPROPERTIES"): (
        lambda reader: SetPropertiesAction(read_options(reader)),
        _ALL_KINDS - {"index"},
    ),
    ("UNSET", "TBLPROPERTIES"): (_unset_properties, _ALL_KINDS - {"index"}),
    ("RENAME", "TO"): (lambda reader: RenameAction(reader.object_name("a new name")), _ALL_KINDS),
    ("ADD", "COLUMNS"): (_add_columns, frozenset({"table"})),
    ("ADD", "COLUMN"): (_add_columns, frozenset({"table"})),
    ("ALTER",): (_alter_column, frozenset({"table"})),
    ("ADD", "TABLES"): (_add_tables, frozenset({"source"})),
    ("ADD", "TABLE"): (_add_tables, frozenset({"source"})),
}
"""Reader of each action, and the kinds of objects that have it. Tools say VIEW for materialized
ones too."""


def read_alter(reader: StatementReader) -> SqlStatement:
    """Take an ALTER."""
    position = reader.position
    reader.need("ALTER")
    if reader.take_any("ROLE", "USER"):
        return read_alter_role(reader, position)
    kind = read_kind(reader)
    if_exists = reader.take("IF", "EXISTS")
    name = reader.object_name(f"the name of a {kind}")
    for words, (read, kinds) in _ACTIONS.items():
        # An action that this kind does not have is as unknown as any other.
        if kind in kinds and reader.take(*words):
            action = read(reader)
            reader.need_end()
            return AlterObjectStatement(
                position=position, kind=kind, name=name, action=action, if_exists=if_exists
            )
    known = (" ".join(words) for words, (_, kinds) in _ACTIONS.items() if kind in kinds)
    raise reader.unexpected(list_words(known))


# -- DROP, COMMENT ON ----------------------------------------------------------------------------


def read_drop(reader: StatementReader) -> SqlStatement:
    """Take a DROP."""
    position = reader.position
    reader.need("DROP")
    if reader.take_any("ROLE", "USER"):
        return read_drop_roles(reader, position)
    if reader.take_any("TOKENS"):
        return read_drop_tokens(reader, position)
    kind = read_kind(reader)
    if_exists = reader.take("IF", "EXISTS")
    names = reader.object_names(f"the name of a {kind}")
    word = reader.take_any("CASCADE", "RESTRICT")
    reader.need_end("',', CASCADE, RESTRICT or the end of the statement")
    return DropObjectsStatement(
        position=position,
        kind=kind,
        names=names,
        if_exists=if_exists,
        cascade=word == "CASCADE",
    )


def read_comment_on(reader: StatementReader) -> SqlStatement:
    """Take a COMMENT ON."""
    position = reader.position
    reader.need("COMMENT", "ON")
    kind: ObjectKind | Literal["column", "schema"]
    if reader.take("COLUMN"):
        kind = "column"
    elif reader.take_any("SCHEMA", "DATABASE"):
        kind = "schema"
    elif any(reader.follows(*words) for words in KINDS):
        kind = read_kind(reader)
    else:
        raise reader.unexpected(list_words([*_KIND_WORDS, "COLUMN", "SCHEMA"]))
    at = reader.position
    name = reader.object_name(f"the name of a {kind}")
    # A column alone would be one of any table.
    if kind == "column" and len(name) < 2:
        raise reader.error(
            "a column is named with its object", hint="write object.column", position=at
        )
    reader.need("IS")
    comment = None if reader.take("NULL") else _comment(reader)
    reader.need_end()
    return CommentOnStatement(position=position, kind=kind, name=name, comment=comment)

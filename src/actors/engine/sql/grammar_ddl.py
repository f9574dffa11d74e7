"""Grammar of definitions: CREATE, ALTER, DROP, COMMENT ON. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from actors.engine.sql import grammar_columns
from actors.engine.sql.grammar_query import read_as_query, read_query
from actors.engine.sql.grammar_roles import (
    read_alter_role,
    read_create_role,
    read_create_token,
    read_drop_roles,
    read_drop_tokens,
)
from actors.engine.sql.object_names import object_name
from actors.engine.sql.reader import NO_NAMES, StatementReader, list_words
from actors.engine.sql.statements import (
    ChangeStatement,
    CreateTableAsStatement,
    MaintainStatement,
    ObjectKind,
    QualifiedName,
    RefreshViewStatement,
    SqlStatement,
    change_statement,
)
from actors.model.protocol import api
from actors.model.protocol.connector_options import source_configuration, typed_options
from actors.runtime.errors import InvalidUsage, ObjectExists, UnknownObject

KINDS: Final[Mapping[tuple[str, ...], ObjectKind]] = {
    ("MATERIALIZED", "VIEW"): "materialized view",
    ("TABLE",): "table",
    ("VIEW",): "view",
    ("SOURCE",): "source",
    ("SINK",): "sink",
    ("INDEX",): "index",
}
"""The words that name each kind of object."""
_KIND_WORDS: Final = tuple(" ".join(words) for words in KINDS)
_POLICIES: Final = (("AUTO",), ("INCREMENTAL", "STRICT"), ("INCREMENTAL",), ("FULL",))
_TEMPORARY: Final = ("TEMPORARY", "TEMP", "GLOBAL", "LOCAL", "UNLOGGED")
_FORMAT_HINT: Final = (
    "a table cannot have a format, location or partitions; use CREATE SOURCE to read files and"
    " other systems"
)


def need_materialized_view(reader: StatementReader) -> None:
    """Raise `SqlSyntaxError` if MATERIALIZED comes next without VIEW."""
    if reader.follows("MATERIALIZED") and not reader.follows("MATERIALIZED", "VIEW"):
        reader.need("MATERIALIZED", "VIEW")


def read_kind(reader: StatementReader) -> ObjectKind:
    """Read the words that name a kind of object."""
    need_materialized_view(reader)
    for words, kind in KINDS.items():
        if reader.take(*words):
            return kind
    raise reader.unexpected(list_words(_KIND_WORDS))


def read_refresh(reader: StatementReader) -> RefreshViewStatement:
    """Read a REFRESH statement."""
    position = reader.position
    reader.need("REFRESH", "MATERIALIZED", "VIEW")
    reader.take("CONCURRENTLY")
    name = reader.object_name("a view's name")
    reader.refuse(
        "WITH",
        "NO",
        problem="WITH NO DATA is not supported: a view always has its data",
        hint="use DROP to remove the view",
    )
    reader.take("WITH", "DATA")
    reader.need_end()
    return RefreshViewStatement(position=position, name=name)


def read_maintain(reader: StatementReader) -> MaintainStatement:
    """Read a VACUUM or ANALYZE statement; its options are ignored."""
    position = reader.position
    verb = reader.need_any("VACUUM", "ANALYZE")
    reader.place = reader.last
    return MaintainStatement(position=position, verb=verb)


# -- CREATE --------------------------------------------------------------------------------------


class _CreateHead(NamedTuple):
    """The first part of a CREATE statement, up to the kind of the object."""

    position: int
    command: str
    or_replace: bool
    if_not_exists: bool

    def statement(
        self,
        names: tuple[QualifiedName, ...],
        request: Callable[[], api.CatalogStatement],
        **more: Any,
    ) -> ChangeStatement:
        """Return the statement that creates an object with the request that `request` makes. The
        object is the first of `names`."""
        return change_statement(
            lambda: (request(),),
            position=self.position,
            command=self.command,
            names=names,
            skipped=(ObjectExists,) if self.if_not_exists else (),
            **more,
        )


def read_create(reader: StatementReader) -> SqlStatement:
    """Read a CREATE statement."""
    position = reader.position
    reader.need("CREATE")
    or_replace = reader.take("OR", "REPLACE")
    _refuse_create(reader)
    need_materialized_view(reader)
    for words, (read, replaces) in _CREATES.items():
        if not reader.take(*words):
            continue
        # PostgreSQL and Spark agree on the order of the words: IF NOT EXISTS comes after the kind.
        if or_replace and not replaces:
            kind = " ".join(words)
            raise reader.error(
                f"OR REPLACE is not supported for a {kind}",
                hint=f"drop it first, then write CREATE {kind}",
            )
        # PostgreSQL's CONCURRENTLY changes nothing: building an index never blocks writers here.
        if words == ("INDEX",):
            reader.take("CONCURRENTLY")
        if_not_exists = reader.take("IF", "NOT", "EXISTS")
        if or_replace and if_not_exists:
            raise reader.error("OR REPLACE and IF NOT EXISTS cannot be combined")
        command = f"CREATE {' '.join(words)}"
        return read(reader, _CreateHead(position, command, or_replace, if_not_exists))
    raise reader.unexpected(list_words(" ".join(words) for words in _CREATES))


def _refuse_create(reader: StatementReader) -> None:
    if reader.follows_any(*_TEMPORARY):
        raise reader.error(
            f"{reader.peek().word} objects are not supported",
            hint="create it without that word and drop it later, or put the query into WITH",
        )
    reader.refuse(
        "UNIQUE",
        problem="UNIQUE indexes are not supported",
        hint="use a PRIMARY KEY of the table",
    )
    reader.refuse("EXTERNAL", problem="EXTERNAL tables are not supported", hint="use CREATE SOURCE")


def _create_table(reader: StatementReader, head: _CreateHead) -> SqlStatement:
    name = reader.object_name("a table's name")
    # Columns, or a query that defines them. Which of the two is known only after the clauses.
    defined = None
    if reader.follows("("):
        defined = grammar_columns.read_table_elements(reader.bracketed())
    clauses = _clauses(reader, _TABLE_CLAUSES)
    columns, key = defined or ((), ())

    def request() -> api.CreateTable:
        properties = _whole_numbers(clauses.properties, ("retain_history_ms",))
        return api.CreateTable(
            0,
            object_name(name),
            grammar_columns.columns_schema(columns, key),
            properties.get("retain_history_ms"),
            clauses.comment,
            {each.name: each.comment for each in columns if each.comment},
        )

    defaults = {each.name: each.default for each in columns if each.default is not None}
    created = head.statement((name,), request, defaults=defaults)
    if defined is None:
        if not reader.follows("AS"):
            raise reader.unexpected("'(' and columns, or AS and a query", hint=_FORMAT_HINT)
        reader.need("AS")
        query = read_query(reader)
        return CreateTableAsStatement(position=head.position, created=created, query=query)
    reader.refuse(
        "AS",
        problem="AS cannot follow a list of columns",
        hint="name the columns in the query: CREATE TABLE name AS query",
    )
    if not reader.ends():
        raise reader.unexpected(
            "TBLPROPERTIES, COMMENT or the end of the statement", hint=_FORMAT_HINT
        )
    return created


def _create_materialized_view(reader: StatementReader, head: _CreateHead) -> SqlStatement:
    name = reader.object_name("a view's name")
    _refuse_view_columns(reader)
    clauses = _clauses(reader, _MATERIALIZED_CLAUSES)
    query = read_as_query(reader, "REFRESH POLICY, COMMENT, TBLPROPERTIES or AS and a query")

    def request() -> api.CreateView:
        properties = dict(clauses.properties)
        # Spark settings and properties of the service share the clause, as in Spark's own
        # TBLPROPERTIES.
        conf = {
            key: properties.pop(key) for key in clauses.properties if key.startswith(_SPARK_CONF)
        }
        numbers = _whole_numbers(properties)
        return api.CreateView(
            0,
            object_name(name),
            "",
            numbers.get("retain_history_ms"),
            conf,
            clauses.policy,
            numbers.get("target_lag_ms", 0),
            replace=head.or_replace,
            comment=clauses.comment,
        )

    return head.statement((name,), request, query=query)


def _create_view(reader: StatementReader, head: _CreateHead) -> SqlStatement:
    name = reader.object_name("a view's name")
    _refuse_view_columns(reader)
    clauses = _clauses(reader, _TABLE_CLAUSES)
    reader.refuse(
        "REFRESH",
        problem="a plain view cannot have a REFRESH POLICY: its query runs at each read",
        hint="use CREATE MATERIALIZED VIEW",
    )
    query = read_as_query(reader, "COMMENT, TBLPROPERTIES or AS and a query")

    def request() -> api.CreateView:
        # Any other property is metadata that a tool attaches; it has no effect.
        for key in clauses.properties.keys() & set(_PROPERTIES):
            raise InvalidUsage(f"property {key!r} is only for materialized views")
        return api.CreateView(
            0,
            object_name(name),
            "",
            replace=head.or_replace,
            comment=clauses.comment,
            plain=True,
        )

    return head.statement((name,), request, query=query)


def _refuse_view_columns(reader: StatementReader) -> None:
    reader.refuse(
        "(",
        problem="a list of columns is not supported for views",
        hint="name them in the query: SELECT expression AS name",
    )


def _create_index(reader: StatementReader, head: _CreateHead) -> SqlStatement:
    name = None
    if not reader.follows("ON"):
        name = reader.object_name("an index's name or ON")
    reader.need("ON")
    on = reader.object_name("a table's or view's name")
    # The only index type of PostgreSQL's that looks up keys as these indexes do.
    if reader.take("USING"):
        reader.need_any("BTREE", "HASH")
    columns = reader.column_names()
    reader.need_end()
    # An index without a name is named after its object and columns.
    own = name or ("_".join((on[-1], *columns, "idx")),)
    return head.statement(
        (own, on), lambda: api.CreateIndex(0, object_name(own), object_name(on), columns)
    )


def _create_source(reader: StatementReader, head: _CreateHead) -> SqlStatement:
    name = reader.object_name("a source's name")
    kind, options = _connector(reader)
    tables = None
    if reader.take("FOR") and not reader.take("ALL", "TABLES"):
        reader.need("TABLES")
        tables = _source_tables(reader.bracketed("'(' and tables"))
    reader.need_end("OPTIONS, FOR TABLES or the end of the statement")

    def request() -> api.CreateSource:
        configuration = source_configuration({"kind": kind, **typed_options(options)})
        wanted = None if tables is None else _named_tables(tables)
        return api.CreateSource(0, object_name(name), *configuration, wanted)

    return head.statement((name,), request)


def _create_sink(reader: StatementReader, head: _CreateHead) -> SqlStatement:
    name = reader.object_name("a sink's name")
    reader.need_any("ON", "FROM")
    on = reader.object_name("a table's or view's name")
    kind, options = _connector(reader)
    reader.need_end("OPTIONS or the end of the statement")

    def request() -> api.CreateSink:
        encoded = json.dumps(typed_options(options)).encode()
        return api.CreateSink(0, object_name(name), object_name(on), kind, encoded)

    return head.statement((name, on), request)


_CREATES: Final[
    Mapping[tuple[str, ...], tuple[Callable[[StatementReader, _CreateHead], SqlStatement], bool]]
] = {
    ("TABLE",): (_create_table, False),
    ("MATERIALIZED", "VIEW"): (_create_materialized_view, True),
    ("VIEW",): (_create_view, True),
    ("SOURCE",): (_create_source, False),
    ("SINK",): (_create_sink, False),
    ("INDEX",): (_create_index, False),
    ("ROLE",): (
        lambda reader, head: read_create_role(reader, head.position, head.if_not_exists),
        False,
    ),
    ("USER",): (
        lambda reader, head: read_create_role(
            reader, head.position, head.if_not_exists, login=True
        ),
        False,
    ),
    ("TOKEN",): (
        lambda reader, head: read_create_token(reader, head.position, head.if_not_exists),
        False,
    ),
}
"""The function that reads each kind's definition, and whether OR REPLACE is allowed."""


# -- parts of definitions ------------------------------------------------------------------------


class _Clauses(NamedTuple):
    """The clauses of a CREATE that were given."""

    comment: str = ""
    properties: Mapping[str, str] = {}
    policy: str = ""


def _clauses(
    reader: StatementReader,
    known: Mapping[tuple[str, ...], tuple[str, Callable[[StatementReader], Any]]],
) -> _Clauses:
    """Read clauses in any order, each at most once."""
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
            return _Clauses(**found)


def _policy(reader: StatementReader) -> str:
    for words in _POLICIES:
        if reader.take(*words):
            return " ".join(words).lower()
    raise reader.unexpected(list_words(" ".join(words) for words in _POLICIES))


_PROPERTIES: Final = ("retain_history_ms", "target_lag_ms")
_SPARK_CONF: Final = "spark."
"""Prefix of properties that are Spark settings of a view."""


def _whole_numbers(
    properties: Mapping[str, str], known: Sequence[str] = _PROPERTIES
) -> dict[str, int]:
    """Return properties as whole numbers. Raises `InvalidUsage` for an unknown property, or one
    that is not a whole number."""
    found = {}
    for key, text in properties.items():
        if key not in known:
            raise InvalidUsage(f"unknown property {key!r}: expected {', '.join(known)}")
        if not text.strip().lstrip("-").isdecimal():
            raise InvalidUsage(f"invalid property {key!r} = {text!r}: expected a whole number")
        found[key] = int(text)
    return found


def read_options(reader: StatementReader) -> dict[str, str]:
    """Read ``(key value, key = value, …)``; values are strings, numbers or words."""
    inner = reader.bracketed("'(' and options")
    found: dict[str, str] = {}
    while True:
        position, key = inner.position, _option_key(inner)
        if key in found:
            raise inner.error(f"option {key} is given twice", position=position)
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
        parts.append(reader.name("a name after the dot"))
    return ".".join(parts)


def _option_value(reader: StatementReader, key: str) -> str:
    token = reader.peek()
    if token.kind == "text":
        return reader.string()
    # The lexer produces a sign and a number for a negative one.
    sign = reader.take_any("-", "+")
    token = reader.peek()
    if token.kind != "number" and (sign or token.kind != "word"):
        raise reader.unexpected(f"a value of {key}", hint="put a text in single quotes")
    reader.place += 1
    return sign.strip("+") + token.text


_TABLE_CLAUSES: Final[Mapping[tuple[str, ...], tuple[str, Callable[[StatementReader], Any]]]] = {
    ("TBLPROPERTIES",): ("properties", read_options),
    ("COMMENT",): ("comment", grammar_columns.read_comment),
}
_MATERIALIZED_CLAUSES: Final = {**_TABLE_CLAUSES, ("REFRESH", "POLICY"): ("policy", _policy)}


def _connector(reader: StatementReader) -> tuple[str, dict[str, str]]:
    """Read ``USING kind [OPTIONS (…)]``."""
    reader.need("USING")
    kind = reader.name("a kind of connector", refused=NO_NAMES).lower()
    return kind, read_options(reader) if reader.take("OPTIONS") else {}


_SourceTables: TypeAlias = Sequence[tuple[QualifiedName, QualifiedName]]
"""Pairs of an upstream table's name and the name it gets here (empty if none is given)."""


def _source_tables(reader: StatementReader) -> _SourceTables:
    """Read ``a AS b, s.c`` up to the end of the statement."""
    found = []
    while True:
        outside = reader.object_name("a table of the source")
        name: QualifiedName = ()
        if reader.take("AS"):
            name = reader.object_name("a name for the table")
        found.append((outside, name))
        if not reader.take(","):
            break
    reader.need_end("AS, ',' or ')'")
    return found


def _named_tables(tables: _SourceTables) -> tuple[api.SourceTable, ...]:
    return tuple(
        api.SourceTable(".".join(outside), object_name(name) if name else "")
        for outside, name in tables
    )


# -- ALTER ---------------------------------------------------------------------------------------

_ALL_KINDS: Final = frozenset(KINDS.values())


class _Alteration(NamedTuple):
    """The change that an ALTER makes: a function from the object's name to the request, and
    additional fields of the statement."""

    request: Callable[[str], api.CatalogStatement]
    fields: Mapping[str, Any] = {}


_Reading: TypeAlias = Callable[[StatementReader], _Alteration]


def _add_columns(reader: StatementReader) -> _Alteration:
    if_not_exists = reader.take("IF", "NOT", "EXISTS")
    columns = grammar_columns.ColumnList()
    if reader.follows("("):
        inner = reader.bracketed()
        columns.add(inner, grammar_columns.read_column(inner, None))
        while inner.take(","):
            columns.add(inner, grammar_columns.read_column(inner, None))
        inner.need_end("NOT NULL, COMMENT, ',' or ')'")
    else:
        columns.add(reader, grammar_columns.read_column(reader, None))
        # PostgreSQL repeats ADD COLUMN before each column.
        while reader.take(","):
            reader.need("ADD")
            reader.take("COLUMN")
            columns.add(reader, grammar_columns.read_column(reader, None))
    found = columns.found()
    comments = {each.name: each.comment for each in found if each.comment}
    added = grammar_columns.columns_schema(found).columns
    return _Alteration(
        lambda name: api.AlterObject(0, name, add_columns=added, column_comments=comments),
        {"only_new_columns": if_not_exists},
    )


def _alter_column(reader: StatementReader) -> _Alteration:
    reader.take("COLUMN")
    column = reader.name("a column")
    default = None
    if not reader.take("DROP", "DEFAULT"):
        if not reader.take("SET", "DEFAULT"):
            raise reader.unexpected("SET DEFAULT or DROP DEFAULT")
        first = reader.place
        reader.rest("an expression")
        default = grammar_columns.constant_expression(reader, first)
    return _Alteration(lambda name: api.AlterObject(0, name), {"defaults": {column: default}})


def _add_tables(reader: StatementReader) -> _Alteration:
    tables = _source_tables(reader.bracketed() if reader.follows("(") else reader)
    return _Alteration(lambda name: api.AlterSource(0, name, _named_tables(tables)))


def _set_policy(reader: StatementReader) -> _Alteration:
    policy = _policy(reader)
    return _Alteration(lambda name: api.AlterObject(0, name, refresh_policy=policy))


def _rename(reader: StatementReader) -> _Alteration:
    new = reader.object_name("a new name")
    return _Alteration(lambda name: api.AlterObject(0, name, rename=object_name(new)))


def _set_properties(reader: StatementReader) -> _Alteration:
    return _with_properties(read_options(reader))


def _unset_properties(reader: StatementReader) -> _Alteration:
    # Removing a property that is not set is allowed anyway: 0 is the default of all.
    reader.take("IF", "EXISTS")
    inner = reader.bracketed("'(' and names of properties")
    keys = inner.sequence(lambda: _option_key(inner))
    inner.need_end("',' or ')'")
    return _with_properties(dict.fromkeys(keys, "0"))


def _with_properties(properties: Mapping[str, str]) -> _Alteration:
    def request(name: str) -> api.AlterObject:
        given = _whole_numbers(properties)
        retain, lag = given.get("retain_history_ms"), given.get("target_lag_ms")
        return api.AlterObject(0, name, retain_history_ms=retain, target_lag_ms=lag)

    return _Alteration(request)


_ACTIONS: Final[Mapping[tuple[str, ...], tuple[_Reading, frozenset[str]]]] = {
    ("SET", "REFRESH", "POLICY"): (_set_policy, frozenset({"view", "materialized view"})),
    ("SET", "TBLPROPERTIES"): (_set_properties, _ALL_KINDS - {"index"}),
    ("UNSET", "TBLPROPERTIES"): (_unset_properties, _ALL_KINDS - {"index"}),
    ("RENAME", "TO"): (_rename, _ALL_KINDS),
    ("ADD", "COLUMNS"): (_add_columns, frozenset({"table"})),
    ("ADD", "COLUMN"): (_add_columns, frozenset({"table"})),
    ("ALTER",): (_alter_column, frozenset({"table"})),
    ("ADD", "TABLES"): (_add_tables, frozenset({"source"})),
    ("ADD", "TABLE"): (_add_tables, frozenset({"source"})),
}
"""The function that reads each action, and the kinds of objects that support it. Tools also write
VIEW for materialized views."""


def read_alter(reader: StatementReader) -> SqlStatement:
    """Read an ALTER statement."""
    position = reader.position
    reader.need("ALTER")
    if reader.take_any("ROLE", "USER"):
        return read_alter_role(reader, position)
    kind = read_kind(reader)
    if_exists = reader.take("IF", "EXISTS")
    name = reader.object_name(f"the name of a {kind}")
    # An action that this kind does not support is reported like any unknown one.
    actions = {words: read for words, (read, kinds) in _ACTIONS.items() if kind in kinds}
    read = next((read for words, read in actions.items() if reader.take(*words)), None)
    if read is None:
        raise reader.unexpected(list_words(" ".join(words) for words in actions))
    request, fields = read(reader)
    reader.need_end()
    return change_statement(
        lambda: (request(object_name(name)),),
        position=position,
        command=f"ALTER {kind.upper()}",
        names=(name,),
        kind=kind,
        skipped=(UnknownObject,) if if_exists else (),
        **fields,
    )


# -- DROP, COMMENT ON ----------------------------------------------------------------------------


def read_drop(reader: StatementReader) -> SqlStatement:
    """Read a DROP statement."""
    position = reader.position
    reader.need("DROP")
    if reader.take_any("ROLE", "USER"):
        return read_drop_roles(reader, position)
    if reader.take_any("TOKENS"):
        return read_drop_tokens(reader, position)
    kind = read_kind(reader)
    if_exists = reader.take("IF", "EXISTS")
    names = reader.object_names(f"the name of a {kind}")
    cascade = reader.take_any("CASCADE", "RESTRICT") == "CASCADE"
    reader.need_end("',', CASCADE, RESTRICT or the end of the statement")

    def request(name: str) -> api.CatalogStatement:
        match kind:
            case "source":
                return api.DropSource(0, name, cascade)
            case "sink":
                return api.DropSink(0, name)
        return api.DropObject(0, name, cascade)

    return change_statement(
        lambda: tuple(request(object_name(name)) for name in names),
        position=position,
        command=f"DROP {kind.upper()}",
        names=names,
        kind=kind,
        skipped=(UnknownObject,) if if_exists else (),
    )


def read_comment_on(reader: StatementReader) -> SqlStatement:
    """Read a COMMENT ON statement."""
    position = reader.position
    reader.need("COMMENT", "ON")
    for word in ("SCHEMA", "DATABASE"):
        reader.refuse(word, problem="the schema public cannot have a comment")
    kind = "column" if reader.take("COLUMN") else ""
    if not kind:
        if not any(reader.follows(*words) for words in KINDS):
            raise reader.unexpected(list_words([*_KIND_WORDS, "COLUMN", "SCHEMA"]))
        kind = read_kind(reader)
    at = reader.position
    name = reader.object_name(f"the name of a {kind}")
    column = ""
    if kind == "column":
        # A column name alone could belong to any table.
        if len(name) < 2:
            raise reader.error(
                "a column must be qualified with its object",
                hint="write object.column",
                position=at,
            )
        *parts, column = name
        name = tuple(parts)
    reader.need("IS")
    comment = "" if reader.take("NULL") else grammar_columns.read_comment(reader)
    reader.need_end()
    return change_statement(
        lambda: (api.AlterObject(0, object_name(name), comment=comment, column=column),),
        position=position,
        command="COMMENT",
        names=(name,),
    )

"""Compiles PostgreSQL's SELECT to SQLite's SQL: FROM, joins, sets, CTEs, LATERAL.

The result columns of every query get generated names (``_o1``, ``_o2``, …), because PostgreSQL
allows duplicate and missing names. A set-returning function becomes an array that `json_each`
expands; in the select list it moves to FROM:

    SELECT i.indrelid, unnest(i.indkey) FROM pg_index i
    SELECT i.indrelid AS _o1, _s1.value AS _o2 FROM pg_index AS i JOIN json_each(i.indkey) AS _s1

SQLite does not support LATERAL: a function runs such a subquery as a separate statement for each
row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from sqlglot import exp

from actors.doors.postgres.pg_catalog.call_compiler import ordering
from actors.doors.postgres.pg_catalog.catalog_errors import (
    INVALID_COLUMN_REFERENCE,
    NOT_SUPPORTED,
    SYNTAX_ERROR,
    UNDEFINED_COLUMN,
    UNDEFINED_FUNCTION,
    UNDEFINED_TABLE,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.expression_compiler import (
    CompiledQuery,
    ExpressionCompiler,
    ParameterTypes,
)
from actors.doors.postgres.pg_catalog.function_calls import FunctionCatalog
from actors.doors.postgres.pg_catalog.pg_types import ELEMENT_OF, REGISTERED, TEXTUAL
from actors.doors.postgres.pg_catalog.query_scope import (
    QueryScope,
    RelationColumn,
    RelationShape,
    ScopeSource,
)
from actors.doors.postgres.pg_catalog.result_names import result_name
from actors.doors.postgres.pg_catalog.sql_dialect import (
    called_function,
    called_name,
    identifier_name,
    refuse_unread,
)
from actors.doors.postgres.pg_catalog.typed_sql import (
    TypedSql,
    cast_value,
    common_type,
    decide_type,
)
from actors.model.pgwire.quoting import quote_name, quote_text
from actors.model.pgwire.type_oids import INT8, RECORD, TEXT

FindRelation = Callable[[str, str], tuple[str, RelationShape] | None]
"""Returns the name in SQLite and the columns of a system relation, by schema ("" for none) and
name; None if it does not exist."""
_ON_TRUE: Final = "1"
_SELECT_PARTS: Final = (
    *("with_", "distinct", "expressions", "from_", "joins", "laterals", "where", "group"),
    *("having", "order", "limit", "offset", "locks"),
)


class SelectCompiler:
    """Compiles one query text, including all of its subqueries."""

    def __init__(
        self,
        functions: FunctionCatalog,
        type_oids: Callable[[str], int | None],
        find_relation: FindRelation,
        parameter_types: dict[int, int] | None = None,
        lateral_base: str = "q",
    ) -> None:
        self.parameters = ParameterTypes(parameter_types or {})
        self.expressions = ExpressionCompiler(
            functions, type_oids, self.parameters, self.compile_query
        )
        self._functions = functions
        self._find_relation = find_relation
        self._base = lateral_base
        self._counter = 0
        self.laterals: dict[str, str] = {}
        """The SQL of LATERAL subqueries by name, collected while compiling."""
        self.relations: set[str] = set()
        """The system relations that the query reads, by their names in SQLite."""

    def compile_query(self, node: Any, parent: QueryScope | None = None) -> CompiledQuery:
        """Compile a query. Return its SQL and its columns. Raises `CatalogQueryError`."""
        scope = QueryScope(parent)
        # A query in parentheses.
        if isinstance(node, exp.Subquery):
            return self._compile_wrapped(node, scope)
        head = self._compile_with(node, scope)
        if isinstance(node, exp.SetOperation):
            sql, shape = self._compile_set_operation(node, scope)
        elif isinstance(node, exp.Select):
            sql, shape = self._compile_select(node, scope)
        elif isinstance(node, exp.Values):
            sql, shape = self._compile_values(node, scope)
        else:
            raise CatalogQueryError(
                f"{type(node).__name__} is not supported in a catalog query: use SELECT",
                SYNTAX_ERROR,
            )
        return head + sql, shape

    def _next_alias(self, letter: str) -> str:
        self._counter += 1
        return f"_{letter}{self._counter}"

    # -- WITH, UNION, VALUES -------------------------------------------------------------------

    def _compile_with(self, node: Any, scope: QueryScope) -> str:
        clause = node.args.get("with_")
        if clause is None:
            return ""
        recursive = bool(clause.args.get("recursive"))
        parts = []
        for cte in clause.expressions:
            name = identifier_name(cte.args["alias"].this)
            given = [identifier_name(each) for each in cte.args["alias"].columns]
            if recursive and isinstance(cte.this, exp.SetOperation):
                sql, shape = self._compile_recursive(name, given, cte.this, scope)
            else:
                sql, shape = self.compile_query(cte.this, scope)
                shape = _renamed(shape, given)
            # The CTE is visible to later CTEs and to the query itself.
            scope.ctes[name] = shape
            columns = ", ".join(column.sql for column in shape.columns)
            parts.append(f"{quote_name(name)}({columns}) AS ({sql})")
        return f"WITH {'RECURSIVE ' if recursive else ''}{', '.join(parts)} "

    def _compile_recursive(
        self, name: str, given: list[str], node: Any, scope: QueryScope
    ) -> CompiledQuery:
        """Compile a CTE that may read itself. Its first part determines the columns."""
        sql, shape = self.compile_query(node.this, scope)
        shape = _renamed(shape, given)
        scope.ctes[name] = shape
        rest, _ = self.compile_query(node.expression, scope)
        word = "UNION" if node.args.get("distinct") else "UNION ALL"
        return f"{sql} {word} {rest}", shape

    def _compile_set_operation(self, node: Any, scope: QueryScope) -> CompiledQuery:
        left = self.compile_query(node.this, scope)
        right = self.compile_query(node.expression, scope)
        if len(left[1].columns) != len(right[1].columns):
            raise CatalogQueryError(
                "each UNION query must have the same number of columns", SYNTAX_ERROR
            )
        columns = tuple(
            RelationColumn(
                one.name, one.sql, _common_column_type(one, other), one.fields or other.fields
            )
            for one, other in zip(left[1].columns, right[1].columns, strict=True)
        )
        shape = RelationShape(columns)
        word = {exp.Union: "UNION", exp.Intersect: "INTERSECT", exp.Except: "EXCEPT"}[type(node)]
        if not node.args.get("distinct"):
            if word != "UNION":
                raise CatalogQueryError(
                    f"{word} ALL is not supported in a catalog query", NOT_SUPPORTED
                )
            word = "UNION ALL"
        sql = f"{_arm_sql(left, shape)} {word} {_arm_sql(right, shape)}"
        return self._wrap(node, scope, (sql, shape))

    def _compile_wrapped(self, node: Any, scope: QueryScope) -> CompiledQuery:
        """Compile a query in parentheses, which an ORDER BY or LIMIT may follow."""
        head = self._compile_with(node, scope)
        return self._wrap(node, scope, self.compile_query(node.this, scope), head)

    def _wrap(
        self, node: Any, scope: QueryScope, query: CompiledQuery, head: str = ""
    ) -> CompiledQuery:
        """Wrap a query in one with its CTEs, ORDER BY and LIMIT. SQLite can order a union only by
        its columns, but a query around it also by expressions."""
        sql, shape = query
        scope.name_results(shape)
        tail = self._compile_order(node, scope, shape) + self._compile_limit(node, scope)
        return (f"{head}SELECT * FROM ({sql}){tail}" if head or tail else sql), shape

    def _compile_values(self, node: Any, scope: QueryScope) -> CompiledQuery:
        rows = [
            [self.expressions.compile(each, scope) for each in row.expressions]
            for row in node.expressions
        ]
        types = [common_type(value.type for value in column) for column in zip(*rows, strict=True)]
        texts = [
            ", ".join(decide_type(value, kind).sql for value, kind in zip(row, types, strict=True))
            for row in rows
        ]
        # SQLite names the columns of VALUES as PostgreSQL does.
        columns = tuple(
            RelationColumn(f"column{at}", f"_o{at}", kind) for at, kind in enumerate(types, start=1)
        )
        fields = ", ".join(f"{column.name} AS {column.sql}" for column in columns)
        sql = f"SELECT {fields} FROM (VALUES ({'), ('.join(texts)}))"
        return self._wrap(node, scope, (sql, RelationShape(columns)))

    # -- SELECT --------------------------------------------------------------------------------

    def _compile_select(self, node: Any, scope: QueryScope) -> CompiledQuery:
        refuse_unread(node, *_SELECT_PARTS)
        source = self._compile_from(node, scope)
        sets: dict[str, tuple[str, TypedSql]] = {}
        outputs = list(self._compile_outputs(node, scope, sets))
        # After the select list, which determines the sets.
        source += _join_sets(sets, has_from=bool(source))
        columns = []
        for at, (name, value) in enumerate(outputs, start=1):
            # In a result, a constant of undecided type is text.
            kind = TEXT if value.undecided else value.type
            self.parameters.decide(decide_type(value, kind))
            columns.append(RelationColumn(name, f"_o{at}", kind, value.fields))
        shape = RelationShape(tuple(columns))
        scope.name_results(shape)
        fields = ", ".join(
            f"{value.sql} AS _o{at}" for at, (_, value) in enumerate(outputs, start=1)
        )
        distinct = node.args.get("distinct")
        body = f" FROM {source}" if source else ""
        if node.args.get("where") is not None:
            condition = self.expressions.compile_condition(node.args["where"].this, scope)
            body += f" WHERE {condition}"
        body += self._compile_groups(node, scope, outputs)
        if distinct is not None and distinct.args.get("on") is not None:
            return self._distinct_on(node, scope, outputs, f"SELECT {fields}", body), shape
        word = "DISTINCT " if distinct is not None else ""
        tail = self._compile_order(node, scope, shape) + self._compile_limit(node, scope)
        return f"SELECT {word}{fields}{body}{tail}", shape

    def _compile_outputs(
        self, node: Any, scope: QueryScope, sets: dict[str, tuple[str, TypedSql]]
    ) -> Iterator[tuple[str, TypedSql]]:
        for each in node.expressions:
            star = _star_of(each)
            if star is not None:
                found = list(scope.star(star))
                if not found:
                    raise CatalogQueryError(
                        f'missing FROM-clause entry for table "{star}"', UNDEFINED_TABLE
                    )
                yield from found
                continue
            inner = each.this if isinstance(each, exp.Alias) else each
            name = (
                identifier_name(each.args["alias"])
                if isinstance(each, exp.Alias)
                else result_name(inner)
            )
            yield name, self._compile_output(inner, scope, sets)

    def _compile_output(
        self, node: Any, scope: QueryScope, sets: dict[str, tuple[str, TypedSql]]
    ) -> TypedSql:
        """Compile an item of the select list, which may contain a set-returning function."""
        found = self._find_set(node)
        if found is None:
            return self.expressions.compile(node, scope)
        made = self.expressions.calls.compile_call(found, scope)
        # Equal calls in one select list advance together, so they share one source.
        alias, _ = sets.setdefault(made.sql, (self._next_alias("s"), made))
        value = TypedSql(f"{alias}.value", made.type, made.fields)
        if found is node:
            return value
        # Compile the expression around the set with the set's current row in its place.
        scope.sources.append(ScopeSource(alias, (("value", value),)))
        place = exp.Column(
            this=exp.Identifier(this="value", quoted=True),
            table=exp.Identifier(this=alias, quoted=True),
        )
        changed = node.copy()
        twin = self._find_set(changed)
        if twin is changed:
            changed = place
        else:
            twin.replace(place)
        made_around = self.expressions.compile(changed, scope)
        scope.sources.pop()
        return made_around

    def _find_set(self, node: Any) -> Any:
        """Return the call of a set-returning function in an expression; None if there is none."""
        # A set in a subquery belongs to that subquery.
        if isinstance(node, exp.Query):
            return None
        if self._functions.returns_set(called_name(node)):
            return node
        for child in node.iter_expressions():
            found = self._find_set(child)
            if found is not None:
                return found
        return None

    def _compile_groups(
        self, node: Any, scope: QueryScope, outputs: list[tuple[str, TypedSql]]
    ) -> str:
        text = ""
        group = node.args.get("group")
        if group is not None and group.expressions:
            keys = [self._input_key(each, scope, outputs) for each in group.expressions]
            text += f" GROUP BY {', '.join(keys)}"
        having = node.args.get("having")
        if having is not None:
            text += f" HAVING {self.expressions.compile_condition(having.this, scope)}"
        return text

    def _input_key(self, node: Any, scope: QueryScope, outputs: list[tuple[str, TypedSql]]) -> str:
        """Compile a key of GROUP BY: an expression, or the name or position of a result column."""
        if isinstance(node, exp.Literal) and not node.is_string:
            return outputs[_place_in(node, len(outputs)) - 1][1].sql
        if isinstance(node, exp.Column) and not node.args.get("table"):
            name = identifier_name(node.this)
            named = [value for each, value in outputs if each == name]
            # Columns of the input take precedence over those of the result.
            if named and scope.resolve("", name) is None:
                return named[0].sql
        return self.expressions.compile(node, scope).sql

    def _compile_order(self, node: Any, scope: QueryScope, shape: RelationShape) -> str:
        """Compile ORDER BY. Its keys are names or positions of result columns, or expressions."""
        terms = []
        order = node.args.get("order")
        for each in order.expressions if order is not None else ():
            key = each.this
            if isinstance(key, exp.Literal) and not key.is_string:
                sql = f"_o{_place_in(key, len(shape.columns))}"
            elif (
                isinstance(key, exp.Column)
                and not key.args.get("table")
                and identifier_name(key.this) in scope.aliases
            ):
                sql = scope.aliases[identifier_name(key.this)].sql
            else:
                sql = self.expressions.compile(key, scope).sql
            terms.append(sql + ordering(each))
        return f" ORDER BY {', '.join(terms)}" if terms else ""

    def _compile_limit(self, node: Any, scope: QueryScope) -> str:
        """Compile LIMIT and OFFSET. Locking clauses are ignored, because nothing here changes."""
        text = ""
        limit, offset = node.args.get("limit"), node.args.get("offset")
        if limit is not None and not (isinstance(limit, exp.Limit) and limit.is_limit_all):
            # Refuses WITH TIES.
            if limit.args.get("limit_options"):
                refuse_unread(limit.args["limit_options"], "rows")
            count = limit.args.get("count") if isinstance(limit, exp.Fetch) else limit.expression
            text += f" LIMIT {self._compile_count(count, scope) if count is not None else '1'}"
        # SQLite does not support OFFSET without LIMIT.
        elif offset is not None:
            text += " LIMIT -1"
        if offset is not None:
            text += f" OFFSET {self._compile_count(offset.expression, scope)}"
        return text

    def _compile_count(self, node: Any, scope: QueryScope) -> str:
        value = self.expressions.compile_as(node, scope, INT8)
        # NULL means no limit, which is -1 in SQLite.
        return f"coalesce({value.sql}, -1)"

    def _distinct_on(
        self,
        node: Any,
        scope: QueryScope,
        outputs: list[tuple[str, TypedSql]],
        select: str,
        body: str,
    ) -> str:
        """Compile DISTINCT ON, by numbering all rows and those of each key in the requested
        order."""
        keys = [
            self._input_key(each, scope, outputs)
            for each in node.args["distinct"].args["on"].expressions
        ]
        order = node.args.get("order")
        terms = [
            self._input_key(each.this, scope, outputs) + ordering(each)
            for each in (order.expressions if order is not None else ())
        ]
        by = f"ORDER BY {', '.join(terms)}" if terms else ""
        inner = (
            f"{select}, row_number() OVER (PARTITION BY {', '.join(keys)} {by}) AS _first,"
            f" row_number() OVER ({by}) AS _place{body}"
        )
        fields = ", ".join(f"_o{at}" for at in range(1, len(outputs) + 1))
        sql = f"SELECT {fields} FROM ({inner}) WHERE _first = 1 ORDER BY _place"
        return sql + self._compile_limit(node, scope)

    # -- FROM ----------------------------------------------------------------------------------

    def _compile_from(self, node: Any, scope: QueryScope) -> str:
        clause = node.args.get("from_")
        if clause is None:
            return ""
        text = self._compile_source(clause.this, scope)
        for join in node.args.get("joins") or ():
            text += self._compile_join(join, scope)
        for lateral in node.args.get("laterals") or ():
            text += f" JOIN {self._compile_source(lateral, scope)}"
        return text

    def _compile_join(self, join: Any, scope: QueryScope) -> str:
        before = list(scope.sources)
        source = self._compile_source(join.this, scope)
        added = scope.sources[len(before) :]
        side, method = join.side, join.method
        word = f"{side} JOIN" if side else "JOIN"
        if method == "NATURAL" or join.args.get("using"):
            condition = self._merge_columns(join, scope, before, added, side)
        elif join.args.get("on") is not None:
            condition = self.expressions.compile_condition(join.args["on"], scope)
        else:
            # Avoid CROSS JOIN, which prevents SQLite from reordering the join.
            condition = _ON_TRUE
        return f" {word} {source} ON {condition}"

    def _merge_columns(
        self,
        join: Any,
        scope: QueryScope,
        before: list[ScopeSource],
        added: list[ScopeSource],
        side: str,
    ) -> str:
        """Compile USING or NATURAL, which merge columns of both sides."""
        names = [identifier_name(each) for each in join.args.get("using") or ()]
        if join.method == "NATURAL":
            left = {name for source in before for name, _ in source.columns}
            names = [name for source in added for name, _ in source.columns if name in left]
        conditions = []
        for name in names:
            merged = [value for each, value in scope.merged if each == name]
            ones = merged or [value for source in before for value in source.find(name)]
            others = [value for source in added for value in source.find(name)]
            if not ones or not others:
                raise CatalogQueryError(
                    f'column "{name}" specified in USING clause does not exist', UNDEFINED_COLUMN
                )
            conditions.append(f"{ones[0].sql} = {others[0].sql}")
            value = others[0] if side == "RIGHT" else ones[0]
            if side == "FULL":
                value = TypedSql(f"coalesce({ones[0].sql}, {others[0].sql})", ones[0].type)
            scope.merged = [each for each in scope.merged if each[0] != name] + [(name, value)]
        return " AND ".join(conditions) or _ON_TRUE

    def _compile_source(self, node: Any, scope: QueryScope) -> str:
        """Compile an item of FROM, and add its columns to the scope."""
        if isinstance(node, exp.Lateral):
            return self._compile_lateral(node, scope)
        if isinstance(node, exp.Select | exp.SetOperation | exp.Values):
            return self._compile_derived(node, node, scope)
        if isinstance(node, exp.Subquery | exp.Paren):
            text = self._compile_parenthesised(node, scope)
        elif isinstance(node, exp.Table):
            text = self._compile_table(node, scope)
        else:
            raise CatalogQueryError(
                f"not supported in FROM of a catalog query: {node.sql('postgres')}",
                NOT_SUPPORTED,
            )
        joins = node.args.get("joins") or ()
        if joins:
            return f"({text}{''.join(self._compile_join(each, scope) for each in joins)})"
        return text

    def _compile_parenthesised(self, node: Any, scope: QueryScope) -> str:
        inner = node.this
        if isinstance(inner, exp.Table | exp.Subquery | exp.Lateral) and (
            not isinstance(inner, exp.Subquery) or node.args.get("alias") is None
        ):
            # These parentheses surround a join instead of a query.
            text = self._compile_source(inner, scope)
            return f"({text})" if not text.startswith("(") else text
        return self._compile_derived(inner, node, scope)

    def _compile_table(self, node: Any, scope: QueryScope) -> str:
        if isinstance(node.this, exp.Func | exp.Anonymous):
            return self._compile_function(node, node.this, scope)
        if isinstance(node.this, exp.Query | exp.Values):
            return self._compile_derived(node.this, node, scope)
        refuse_unread(node, "this", "db", "catalog", "alias", "joins", "only")
        schema = identifier_name(node.args["db"]) if node.args.get("db") else ""
        name = identifier_name(node.this)
        cte = scope.find_cte(name) if not schema else None
        # A CTE hides a system relation of the same name.
        if cte is not None:
            sql, shape = quote_name(name), cte
        else:
            found = self._find_relation(schema, name)
            if found is None:
                shown = f"{schema}.{name}" if schema else name
                raise CatalogQueryError(f'relation "{shown}" does not exist', UNDEFINED_TABLE)
            sql, shape = found
            self.relations.add(sql)
            sql = quote_name(sql)
        return self._add_source(sql, shape, node, name, scope)

    def _add_source(
        self, sql: str, shape: RelationShape, node: Any, name: str, scope: QueryScope
    ) -> str:
        shown, given = _alias_of(node, name)
        quoted = quote_name(shown)
        columns = tuple(
            (column.name, TypedSql(f"{quoted}.{column.sql}", column.type, column.fields))
            for column in _renamed(shape, given).columns
        )
        scope.sources.append(ScopeSource(shown, columns, oid=shape.oid))
        return f"{sql} AS {quoted}"

    def _compile_derived(self, query: Any, node: Any, scope: QueryScope) -> str:
        """Compile a subquery in FROM; `node` is the FROM item, which may have an alias."""
        # A subquery does not see the other items of FROM.
        sql, shape = self.compile_query(query, _without_sources(scope))
        return self._add_source(f"({sql})", shape, node, self._next_alias("d"), scope)

    def _unnest_several(self, arguments: list[Any], scope: QueryScope) -> TypedSql:
        """Compile unnest with several arrays, whose elements become columns of the same rows."""
        arrays = [self.expressions.compile(each, scope) for each in arguments]
        fields = tuple(
            (f"f{at}", ELEMENT_OF.get(array.type, TEXT)) for at, array in enumerate(arrays, start=1)
        )
        sql = f"pg_zip_arrays({', '.join(array.sql for array in arrays)})"
        return TypedSql(sql, RECORD, fields)

    def _compile_function(self, node: Any, call: Any, scope: QueryScope) -> str:
        """Compile a function in FROM; `node` is the FROM item, which may have an alias."""
        name = called_name(call)
        schema = identifier_name(node.args["db"]) if node.args.get("db") else "pg_catalog"
        if schema not in ("pg_catalog", "information_schema"):
            raise CatalogQueryError(f"function {schema}.{name} does not exist", UNDEFINED_FUNCTION)
        arguments = called_function(call).expressions
        if name == "unnest" and len(arguments) > 1:
            made = self._unnest_several(arguments, scope)
        elif self._functions.returns_set(name):
            made = self.expressions.calls.compile_call(call, scope)
        else:
            # In FROM, any other function is a set of one row.
            value = self.expressions.compile(call, scope)
            made = TypedSql(f"json_array({value.sql})", value.type)
        return self._add_set(made, name, node, scope)

    def _add_set(self, made: TypedSql, name: str, node: Any, scope: QueryScope) -> str:
        """Add the elements of an array as an item of FROM."""
        shown, given = _alias_of(node, name)
        quoted = quote_name(shown)
        columns: list[tuple[str, TypedSql]] = []
        if made.fields:
            for field, kind in made.fields:
                columns.append(
                    (field, TypedSql(f"json_extract({quoted}.value, '$.{field}')", kind))
                )
        else:
            # The only column is named by the alias unless it has its own name.
            columns.append((shown, TypedSql(f"{quoted}.value", made.type)))
        if node.args.get("ordinality"):
            columns.append(("ordinality", TypedSql(f"({quoted}.key + 1)", INT8)))
        named = [
            (given[at] if at < len(given) else column, value)
            for at, (column, value) in enumerate(columns)
        ]
        scope.sources.append(ScopeSource(shown, tuple(named), scalar=not made.fields))
        return f"json_each({made.sql}) AS {quoted}"

    def _compile_lateral(self, node: Any, scope: QueryScope) -> str:
        inner = node.this
        if not isinstance(inner, exp.Query):
            return self._compile_function(node, inner, scope)
        around = QueryScope(scope, lateral=True)
        sql, shape = self.compile_query(
            inner.this if isinstance(inner, exp.Subquery) else inner, around
        )
        name = f"{self._base}{len(self.laterals)}"
        self.laterals[name] = sql
        # The values of the current row, in the order in which the subquery binds them.
        taken = "".join(f", {outer}" for outer in around.outside or ())
        shown, given = _alias_of(node, self._next_alias("l"))
        quoted = quote_name(shown)
        columns = tuple(
            (
                column.name,
                TypedSql(f"json_extract({quoted}.value, '$[{at}]')", column.type, column.fields),
            )
            for at, column in enumerate(_renamed(shape, given).columns)
        )
        scope.sources.append(ScopeSource(shown, columns))
        return f"json_each(pg_lateral({quote_text(name)}{taken})) AS {quoted}"


def _renamed(shape: RelationShape, names: list[str]) -> RelationShape:
    """Return a shape with the column names of an alias."""
    columns = list(shape.columns)
    for at, name in enumerate(names[: len(columns)]):
        columns[at] = msgspec.structs.replace(columns[at], name=name)
    return RelationShape(tuple(columns), shape.oid)


def _without_sources(scope: QueryScope) -> QueryScope:
    """Return the scope for a subquery in FROM: the CTEs of its query, and the enclosing queries."""
    made = QueryScope(scope.parent)
    made.ctes = scope.ctes
    return made


def _star_of(node: Any) -> str | None:
    """Return the table of ``table.*``, "" for ``*``, and None for any other expression."""
    if isinstance(node, exp.Star):
        return ""
    if isinstance(node, exp.Column) and isinstance(node.this, exp.Star):
        return identifier_name(node.args["table"])
    return None


def _alias_of(node: Any, name: str) -> tuple[str, list[str]]:
    """Return the alias of a FROM item, or `name` if it has none, and the column names of the
    alias."""
    alias = node.args.get("alias")
    if alias is None:
        return name, []
    given = [identifier_name(each) for each in alias.columns]
    return identifier_name(alias.this) if alias.this else name, given


def _place_in(node: Any, count: int) -> int:
    """Return the position in the select list that a key names. Raises `CatalogQueryError`."""
    text = str(node.this)
    if not text.isdecimal() or not 1 <= int(text) <= count:
        raise CatalogQueryError(f"position {text} is not in select list", INVALID_COLUMN_REFERENCE)
    return int(text)


def _join_sets(sets: dict[str, tuple[str, TypedSql]], *, has_from: bool) -> str:
    """Return the joins with the sets of a select list. Several sets advance together, row by
    row."""
    text = ""
    for at, (sql, (alias, _)) in enumerate(sets.items()):
        if at == 0:
            text += f"{' JOIN ' if has_from else ''}json_each({sql}) AS {alias}"
            first = alias
        else:
            text += f" LEFT JOIN json_each({sql}) AS {alias} ON {alias}.key = {first}.key"
    return text


def _common_column_type(one: RelationColumn, other: RelationColumn) -> int:
    # If one arm has names and the other a type such as `regclass`, the column has names.
    if one.type in REGISTERED and other.type in TEXTUAL:
        return TEXT
    # A column with only NULLs is typed as text, so prefer the other arm's type.
    if one.type == TEXT and other.type not in TEXTUAL:
        return other.type
    return common_type((one.type, other.type))


def _arm_sql(arm: CompiledQuery, shape: RelationShape) -> str:
    """Return an arm of a union, with OIDs converted to names where the union's column is text."""
    fields = []
    for one, wanted in zip(arm[1].columns, shape.columns, strict=True):
        value = TypedSql(one.sql, one.type)
        if one.type in REGISTERED and wanted.type == TEXT:
            value = cast_value(value, TEXT)
        fields.append(f"{value.sql} AS {wanted.sql}")
    # Nested in FROM, because SQLite does not support ORDER BY or LIMIT in an arm.
    return f"SELECT {', '.join(fields)} FROM ({arm[0]})"

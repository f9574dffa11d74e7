"""The system tables in an in-memory SQLite database: PostgreSQL's own rows, and a snapshot's.

Each table and view of `pg_catalog` and `information_schema` exists here with the same columns. A
view is created when a query first names it, from PostgreSQL's own definition and by the compiler
that also compiles queries. A view whose definition is not in the data file is an empty table. Calls
are synchronous, from a single thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import apsw

from actors.doors.postgres.pg_catalog.catalog_data import (
    SystemRelationShape,
    load_system_catalog,
)
from actors.doors.postgres.pg_catalog.catalog_errors import (
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    QUERY_CANCELED,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.catalog_functions import CatalogFunctions
from actors.doors.postgres.pg_catalog.catalog_snapshot import PgCatalogSnapshot
from actors.doors.postgres.pg_catalog.function_calls import FUNCTION_PREFIX, FunctionCatalog
from actors.doors.postgres.pg_catalog.pg_types import ELEMENT_OF, INTEGERS, NUMBERS, REGISTERED
from actors.doors.postgres.pg_catalog.query_scope import RelationColumn, RelationShape
from actors.doors.postgres.pg_catalog.scalar_functions import (
    NULL_TAKERS,
    OPERATOR_FUNCTIONS,
    OPERATOR_NULL_TAKERS,
    PURE_FUNCTIONS,
)
from actors.doors.postgres.pg_catalog.select_compiler import SelectCompiler
from actors.doors.postgres.pg_catalog.snapshot_rows import (
    SYSTEM_ATTRIBUTES,
    SnapshotRows,
    attribute_row,
)
from actors.doors.postgres.pg_catalog.sql_dialect import parse_query
from actors.doors.postgres.pg_catalog.typed_sql import array_json
from actors.model.pgwire.quoting import quote_name, quote_text
from actors.model.pgwire.type_oids import BOOL, FLOAT4, FLOAT8

STEPS_MAX: Final = 200_000_000
"""Maximum steps of SQLite's virtual machine per query, about a few seconds."""
STEPS_BETWEEN: Final = 100_000
_INDEXES: Final = {
    "pg_attribute": ("attrelid, attnum",),
    "pg_class": ("oid", "relname", "relnamespace"),
    "pg_constraint": ("conrelid", "oid", "conindid"),
    "pg_depend": ("refobjid", "objid"),
    "pg_description": ("objoid, objsubid",),
    "pg_index": ("indrelid", "indexrelid"),
    "pg_namespace": ("oid", "nspname"),
    "pg_proc": ("oid", "proname"),
    "pg_type": ("oid", "typname", "typrelid", "typelem"),
    "pg_operator": ("oid",),
    "pg_opclass": ("oid",),
    "pg_rewrite": ("ev_class",),
}
_CATALOG_FUNCTIONS_WITH_NULLS: Final = frozenset(
    {"format_type", "pg_get_expr", "aclexplode", "set_config"}
)
_EACH_TIME: Final = frozenset({"pg_lateral", "pg_cancel_backend", "pg_terminate_backend"})
"""Functions with side effects, which SQLite must call exactly once per row."""
_OWN_VIEWS: Final = {
    "pg_stat_activity": "SELECT value ->> 'datid' AS datid, value ->> 'datname' AS datname,"
    " value ->> 'pid' AS pid, NULL AS leader_pid, value ->> 'usesysid' AS usesysid,"
    " value ->> 'usename' AS usename, value ->> 'application_name' AS application_name,"
    " value ->> 'client_addr' AS client_addr, NULL AS client_hostname,"
    " value ->> 'client_port' AS client_port, value ->> 'backend_start' AS backend_start,"
    " value ->> 'query_start' AS xact_start, value ->> 'query_start' AS query_start,"
    " value ->> 'query_start' AS state_change, NULL AS wait_event_type, NULL AS wait_event,"
    " value ->> 'state' AS state, NULL AS backend_xid, NULL AS backend_xmin, NULL AS query_id,"
    " value ->> 'query' AS query, 'client backend' AS backend_type"
    " FROM json_each(pg_sessions())",
    "pg_stat_ssl": "SELECT value ->> 'pid' AS pid, 0 AS ssl, NULL AS version,"
    " NULL AS cipher, NULL AS bits, NULL AS client_dn, NULL AS client_serial, NULL AS issuer_dn"
    " FROM json_each(pg_sessions())",
    "pg_stat_gssapi": "SELECT value ->> 'pid' AS pid, 0 AS gss_authenticated, NULL AS principal,"
    " 0 AS encrypted FROM json_each(pg_sessions())",
    # The session's settings override the defaults.
    "pg_settings": "SELECT name, pg_setting_now(name, setting) AS setting, unit, category,"
    " short_desc, NULL AS extra_desc, context, vartype, source, min_val, max_val, enumvals,"
    " boot_val, reset_val, NULL AS sourcefile, NULL AS sourceline, 0 AS pending_restart"
    ' FROM "pg_settings/rows"',
}


class CatalogDatabase:
    """The system tables of one database. `apply_snapshot` updates them."""

    def __init__(self) -> None:
        self.system = load_system_catalog()
        self.functions = CatalogFunctions(self.system)
        self.version: int | None = None
        """The version of the current snapshot; None before the first."""
        self._laterals: Mapping[str, str] = {}
        """The LATERAL subqueries of the running query."""
        self._view_laterals: dict[str, str] = {}
        """The LATERAL subqueries of the views that were created."""
        self._compilers = itertools.count()
        self._shapes: dict[tuple[str, str], tuple[str, RelationShape]] = {}
        self._views: set[str] = set()
        """Views that are not created yet, by their names in SQLite."""
        self._static: dict[str, int] = {}
        """For each table, the last row of PostgreSQL's own rows, which precede the snapshot's."""
        self._connection = apsw.Connection(":memory:")
        # LIKE is case-sensitive in PostgreSQL, but not by default in SQLite.
        self._connection.execute("PRAGMA case_sensitive_like = ON")
        self._connection.execute("PRAGMA journal_mode = OFF")
        # Queries run on the event loop, so stop one that would take many seconds.
        self._steps_left: float = math.inf
        self._connection.set_progress_handler(self._count_steps, STEPS_BETWEEN)
        self._types = {row["oid"]: row for row in self.system.rows["pg_type"].records()}
        self._type_oids = {row["typname"]: oid for oid, row in self._types.items()}
        self._register_functions()
        self.function_catalog = FunctionCatalog(
            self.system, (*PURE_FUNCTIONS, *self.functions.functions())
        )
        with self._connection:
            for shape in self.system.relations:
                self._make_relation(shape)
            self._fill_tables()

    # -- setup ---------------------------------------------------------------------------------

    def _register_functions(self) -> None:
        groups: tuple[tuple[Mapping[str, Callable[..., Any]], str, frozenset[str]], ...] = (
            (PURE_FUNCTIONS, FUNCTION_PREFIX, NULL_TAKERS),
            (self.functions.functions(), FUNCTION_PREFIX, _CATALOG_FUNCTIONS_WITH_NULLS),
            (OPERATOR_FUNCTIONS, "", OPERATOR_NULL_TAKERS),
            (self.functions.operators(), "", frozenset({"pg_setting_now"})),
            ({"pg_lateral": self._run_lateral}, "", frozenset({"pg_lateral"})),
        )
        for functions, prefix, null_takers in groups:
            for name, function in functions.items():
                called = _guarded(name, function, strict=name not in null_takers)
                # The functions are deterministic within one statement, because neither the catalog
                # nor the session changes meanwhile.
                self._connection.create_scalar_function(
                    prefix + name, called, -1, deterministic=name not in _EACH_TIME
                )

    def _make_relation(self, shape: SystemRelationShape) -> None:
        name = sqlite_name(shape.schema, shape.name)
        columns = tuple(
            RelationColumn(column.name, quote_name(column.name), column.type)
            for column in shape.columns
        )
        self._shapes[shape.schema, shape.name] = name, RelationShape(columns, shape.oid)
        # PostgreSQL's own rows are in a separate table, which the view may read.
        if name in _OWN_VIEWS:
            self._make_table(f"{name}/rows", shape)
            self._connection.execute(f"CREATE VIEW {quote_name(name)} AS {_OWN_VIEWS[name]}")
        # Compile this view when it is first read: compiling all views takes a second.
        elif f"{shape.schema}.{shape.name}" in self.system.views:
            self._views.add(name)
        else:
            self._make_table(name, shape)

    def _make_table(self, name: str, shape: SystemRelationShape) -> None:
        columns = ", ".join(
            f"{quote_name(column.name)} {_affinity(column.type)}"
            f" DEFAULT {_default(column.type, required=column.required)}"
            for column in shape.columns
        )
        self._connection.execute(f"CREATE TABLE {quote_name(name)} ({columns})")
        for index, keys in enumerate(_INDEXES.get(name, ())):
            self._connection.execute(
                f"CREATE INDEX {quote_name(f'{name}/{index}')} ON {quote_name(name)} ({keys})"
            )

    def _fill_tables(self) -> None:
        for table, rows in self.system.rows.items():
            place = f"{table}/rows" if table in _OWN_VIEWS else table
            values = [_held_column(rows.values_of(column)) for column in rows.columns]
            self._insert(place, tuple(rows.columns), zip(*values, strict=True))
        self._insert_records("pg_attribute", self._system_attributes())
        for name in self._tables():
            (last,) = next(
                iter(
                    self._connection.execute(
                        f"SELECT coalesce(max(rowid), 0) FROM {quote_name(name)}"
                    )
                )
            )
            self._static[name] = last

    def _tables(self) -> list[str]:
        found = self._connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        return [name for (name,) in found]

    def _system_attributes(self) -> Iterator[dict[str, Any]]:
        """Yield the columns of the system relations and of their indexes."""
        types = self._types
        columns = {shape.oid: shape.columns for shape in self.system.relations}
        for shape in self.system.relations:
            for number, column in enumerate(shape.columns, start=1):
                yield attribute_row(shape.oid, number, column.name, types[column.declared]) | {
                    "attnotnull": column.required,
                    "attndims": column.dimensions,
                    "atttypmod": column.modifier,
                    "attcollation": column.collation,
                }
            if shape.kind == "r":
                for name, kind, number in SYSTEM_ATTRIBUTES:
                    yield attribute_row(shape.oid, number, name, types[kind]) | {"attnotnull": True}
        classes = self.system.rows["pg_opclass"]
        key_types = dict(
            zip(classes.values_of("oid"), classes.values_of("opckeytype"), strict=True)
        )
        for index in self.system.rows["pg_index"].records():
            of_relation = columns.get(index["indrelid"], ())
            for number, place in enumerate(index["indkey"], start=1):
                if 0 < place <= len(of_relation):
                    column = of_relation[place - 1]
                    # An index may store a different type than its column: a `name` as a C string.
                    kind = key_types.get(index["indclass"][number - 1]) or column.declared
                    row = attribute_row(index["indexrelid"], number, column.name, types[kind])
                    yield row | {"attcollation": column.collation}

    def _insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        names = ", ".join(quote_name(name) for name in columns)
        places = ", ".join("?" * len(columns))
        self._connection.executemany(
            f"INSERT INTO {quote_name(table)} ({names}) VALUES ({places})",
            rows,
        )

    def _insert_records(self, table: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Insert rows, each of which may have its own set of columns."""
        groups: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
        for record in records:
            groups.setdefault(tuple(record), []).append(tuple(record.values()))
        for columns, rows in groups.items():
            values = [_held_column(column) for column in zip(*rows, strict=True)]
            self._insert(table, columns, zip(*values, strict=True))

    # -- the snapshot --------------------------------------------------------------------------

    def apply_snapshot(self, snapshot: PgCatalogSnapshot) -> None:
        """Replace the snapshot, unless it is the current version."""
        if snapshot.version == self.version:
            return
        rows = SnapshotRows(snapshot, self.system, self._types).rows
        with self._connection:
            # Keep PostgreSQL's own rows, which are the first of each table.
            for table, last in self._static.items():
                self._connection.execute(f"DELETE FROM {quote_name(table)} WHERE rowid > {last}")
            for table, records in rows.items():
                self._insert_records(table, records)
        # Update the lookups last, so that a failure leaves both tables and lookups unchanged.
        self.functions.lookups.fill(rows)
        self.functions.database = snapshot.database
        self.version = snapshot.version

    # -- compiling and running -----------------------------------------------------------------

    def type_oid(self, name: str) -> int | None:
        """Return the OID of a built-in type by its catalog name; None if it is unknown."""
        return self._type_oids.get(name)

    def find_relation(self, schema: str, name: str) -> tuple[str, RelationShape] | None:
        """Return a system relation's name in SQLite and its columns; None if it is unknown. An
        empty `schema` means `pg_catalog`."""
        return self._shapes.get((schema or "pg_catalog", name))

    def make_compiler(self, parameter_types: Mapping[int, int] | None = None) -> SelectCompiler:
        """Create a compiler for one query text."""
        return SelectCompiler(
            self.function_catalog,
            self.type_oid,
            self.find_relation,
            dict(parameter_types or {}),
            lateral_base=f"q{next(self._compilers)}_",
        )

    def make_views(self, relations: Iterable[str]) -> None:
        """Create those of these relations that are views and are not created yet."""
        for name in sorted(set(relations) & self._views):
            schema, _, view = name.rpartition(".")
            key = (schema or "pg_catalog", view)
            compiler = self.make_compiler()
            sql, shape = compiler.compile_query(parse_query(self.system.views[".".join(key)]))
            # First create the views that this view reads.
            self.make_views(compiler.relations)
            wanted = self._shapes[key][1].columns
            fields = ", ".join(
                f"{made.sql} AS {column.sql}"
                for made, column in zip(shape.columns, wanted, strict=True)
            )
            self._connection.execute(
                f"CREATE VIEW {quote_name(name)} AS SELECT {fields} FROM ({sql})"
            )
            # A view lives as long as the database, so keep its subqueries.
            self._view_laterals.update(compiler.laterals)
            self._views.discard(name)

    def run(
        self, sql: str, bindings: Mapping[str, Any], laterals: Mapping[str, str]
    ) -> list[tuple[Any, ...]]:
        """Run compiled SQL and return the rows as SQLite stores them. Raises
        `CatalogQueryError`."""
        self._laterals = laterals
        # Count steps instead of time, so that a query ends in the same way everywhere.
        self._steps_left = STEPS_MAX // STEPS_BETWEEN
        try:
            return list(self._connection.execute(sql, bindings))
        except apsw.InterruptError:
            raise CatalogQueryError(
                "the catalog query takes too many steps: reduce what it reads", QUERY_CANCELED
            ) from None
        except apsw.Error as error:
            raise CatalogQueryError(f"the catalog query failed: {error}", NOT_SUPPORTED) from error
        finally:
            self._steps_left = math.inf

    def _count_steps(self) -> bool:
        """Return True to stop the running query. SQLite calls this every `STEPS_BETWEEN` steps."""
        self._steps_left -= 1
        return self._steps_left < 0

    def _run_lateral(self, name: str, *values: Any) -> str:
        """Run a LATERAL subquery for one row of the preceding relations. Return its rows as a JSON
        array."""
        sql = self._laterals.get(name) or self._view_laterals[name]
        bindings = {f"l{at}": value for at, value in enumerate(values)}
        return array_json(list(row) for row in self._connection.execute(sql, bindings))


def sqlite_name(schema: str, name: str) -> str:
    """Return the name of a system relation in SQLite."""
    return name if schema == "pg_catalog" else f"{schema}.{name}"


def _guarded(name: str, function: Callable[..., Any], *, strict: bool) -> Callable[..., Any]:
    """Wrap a function so that its errors become `CatalogQueryError`.

    A strict function, like most of PostgreSQL's, is not called with NULLs but returns NULL.
    """

    def called(*values: Any) -> Any:
        if strict and None in values:
            return None
        try:
            return function(*values)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # The function does not support arguments of these types.
            shown = name.removeprefix(FUNCTION_PREFIX)
            raise CatalogQueryError(f"{shown}: {error}", INVALID_ARGUMENT) from error

    return called


def _affinity(type_oid: int) -> str:
    if type_oid in (FLOAT4, FLOAT8):
        return "REAL"
    # With this affinity, SQLite converts a text that is compared with a number.
    integers = INTEGERS | REGISTERED | {BOOL}
    return "INTEGER" if type_oid in integers else "TEXT"


def _default(type_oid: int, *, required: bool) -> str:
    """Return the default of a column in SQL: zero or empty, or NULL for a nullable other type."""
    if type_oid in NUMBERS or type_oid in REGISTERED or type_oid == BOOL:
        return "0"
    # As in PostgreSQL's catalog, only nullable columns are NULL.
    if not required:
        return "NULL"
    return quote_text("[]" if type_oid in ELEMENT_OF else "")


def _held_column(values: Sequence[Any]) -> Sequence[Any]:
    """Convert a column's values for SQLite: arrays become JSON."""
    if not any(isinstance(value, list) for value in values):
        return values
    texts: dict[str, str] = {}
    held = []
    for value in values:
        if isinstance(value, list):
            # Most lists repeat, so encode each only once.
            key = repr(value)
            value = texts.get(key) or texts.setdefault(key, array_json(value))
        held.append(value)
    return held

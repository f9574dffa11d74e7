"""Generates the rows of `pg_class`, `pg_attribute` and other tables for a snapshot. Pure.

A row maps columns to values. Missing columns are NULL; numbers, Booleans and columns that are not
nullable get the zero of their type. The rows include what PostgreSQL would store for a table, view
or index of the same definition, so that the joins of clients work: an index's operator classes, a
view's rule, a relation's row type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from actors.doors.postgres.pg_catalog.catalog_data import SystemCatalog
from actors.doors.postgres.pg_catalog.catalog_snapshot import (
    CatalogColumnRow,
    CatalogObjectRow,
    OidAssignment,
    PgCatalogSnapshot,
    object_oid,
)
from actors.doors.postgres.pg_catalog.pg_types import ELEMENT_OF
from actors.model.pgwire import type_oids as pg
from actors.model.pgwire.type_map import pg_type_of_spark

CatalogRows = dict[str, list[dict[str, Any]]]
"""Maps each table of `pg_catalog` to its rows."""

SUPERUSER_OID: Final = 10
PG_CLASS_OID: Final = 1259
PG_REWRITE_OID: Final = 2618
HEAP_METHOD: Final = 2
BTREE_METHOD: Final = 403
DEFAULT_COLLATION: Final = 100
C_COLLATION: Final = 950
UTF8_ENCODING: Final = 6
_RELKINDS: Final = {
    "table": "r",
    "materialized view": "m",
    "view": "v",
    "index": "i",
}
SYSTEM_ATTRIBUTES: Final = (
    ("tableoid", pg.OID, -6),
    ("cmax", pg.CID, -5),
    ("xmax", pg.XID, -4),
    ("cmin", pg.CID, -3),
    ("xmin", pg.XID, -2),
    ("ctid", pg.TID, -1),
)
"""The system columns of every stored relation in PostgreSQL, which clients use to identify rows."""


class SnapshotRows:
    """Generates the rows of one snapshot, in `rows`."""

    def __init__(
        self,
        snapshot: PgCatalogSnapshot,
        system: SystemCatalog,
        types: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Generate the rows. `types` maps OIDs to rows of `pg_type`."""
        self._snapshot = snapshot
        self._types = types
        self._public = next(
            row["oid"]
            for row in system.rows["pg_namespace"].records()
            if row["nspname"] == "public"
        )
        self._operator_classes: dict[int, int] = {
            row["opcintype"]: row["oid"]
            for row in system.rows["pg_opclass"].records()
            if row["opcmethod"] == BTREE_METHOD and row["opcdefault"]
        }
        self._oids = OidAssignment(snapshot.objects)
        self._indexed = {each.on.lower() for each in snapshot.objects if each.kind == "index"}
        # Indexes have a separate namespace, so their names do not shadow relations.
        self._by_name = {
            each.name.lower(): each for each in snapshot.objects if each.kind != "index"
        }
        self.rows: CatalogRows = {}
        self._add_roles()
        self._add_database()
        for each in snapshot.objects:
            self._add_object(each)

    def _add(self, table: str, **values: Any) -> None:
        self.rows.setdefault(table, []).append(values)

    def _add_roles(self) -> None:
        first = next((each for each in self._snapshot.roles if each.superuser), None)
        for role in self._snapshot.roles:
            # The first superuser acts as PostgreSQL's bootstrap role, which owns all system
            # objects.
            oid = SUPERUSER_OID if role is first else object_oid(role.name, "role")
            self._add(
                "pg_authid",
                oid=oid,
                rolname=role.name,
                rolsuper=role.superuser,
                rolinherit=True,
                rolcreaterole=role.create_role or role.superuser,
                rolcreatedb=role.superuser,
                rolcanlogin=role.can_login,
                rolreplication=role is first,
                rolbypassrls=role is first,
                rolconnlimit=-1,
            )

    def _add_database(self) -> None:
        self._add(
            "pg_database",
            oid=object_oid(self._snapshot.database, "database"),
            datname=self._snapshot.database,
            datdba=SUPERUSER_OID,
            encoding=UTF8_ENCODING,
            datlocprovider="c",
            datistemplate=False,
            datallowconn=True,
            datconnlimit=-1,
            datfrozenxid=1,
            datminmxid=1,
            dattablespace=1663,
            datcollate="C.UTF-8",
            datctype="C.UTF-8",
        )

    def _add_object(self, each: CatalogObjectRow) -> None:
        if each.kind == "index":
            self._add_index_object(each)
            return
        oid = self._oids.oid_of(each.id)
        stored = each.kind in ("table", "materialized view")
        indexed = bool(each.key) or each.name.lower() in self._indexed
        row_type = self._oids.oid_of(each.id, "type")
        self._add_class(
            each,
            oid,
            reltype=row_type,
            relam=HEAP_METHOD if stored else 0,
            relhasindex=stored and indexed,
            relhasrules="view" in each.kind,
            relnatts=len(each.columns),
            # PostgreSQL's value for relations that store rows.
            relreplident="d" if stored else "n",
            relfrozenxid=1 if stored else 0,
            relminmxid=1 if stored else 0,
            relfilenode=oid if stored else 0,
        )
        # Some clients find a relation's columns through its row type.
        self._add_row_type(each, oid, row_type)
        self._add_attributes(oid, each.columns, frozenset(each.key))
        self._add_defaults(each, oid)
        if stored:
            self._add_system_attributes(oid)
        self._add_comments(each, oid)
        # In PostgreSQL, views have no keys.
        if each.key and stored:
            self._add_key(each, oid)
        if "view" in each.kind:
            self._add_rule(each, oid)

    def _add_class(self, each: CatalogObjectRow, oid: int, **values: Any) -> None:
        row = {
            "oid": oid,
            "relname": each.name,
            "relnamespace": self._public,
            "relowner": SUPERUSER_OID,
            "relkind": _RELKINDS[each.kind],
            # PostgreSQL 15 stores -1 if the number of rows was never estimated.
            "reltuples": -1.0,
            "relpages": 0,
            "relpersistence": "p",
            "relispopulated": True,
        }
        self._add("pg_class", **(row | values))

    def _add_row_type(self, each: CatalogObjectRow, oid: int, row_type: int) -> None:
        array_type = self._oids.oid_of(each.id, "array type")
        shared = {
            "typnamespace": self._public,
            "typowner": SUPERUSER_OID,
            "typlen": -1,
            "typbyval": False,
            "typisdefined": True,
            "typdelim": ",",
            "typalign": "d",
            "typstorage": "x",
            "typtypmod": -1,
        }
        # As in PostgreSQL, the functions are record_in, array_in and so on.
        self._add(
            "pg_type",
            oid=row_type,
            typname=each.name,
            typtype="c",
            typcategory="C",
            typrelid=oid,
            typarray=array_type,
            typinput=2290,
            typoutput=2291,
            typreceive=2402,
            typsend=2403,
            **shared,
        )
        self._add(
            "pg_type",
            oid=array_type,
            typname=f"_{each.name}",
            typtype="b",
            typcategory="A",
            typelem=row_type,
            typsubscript=6179,
            typinput=750,
            typoutput=751,
            typreceive=2400,
            typsend=2401,
            typanalyze=3816,
            **shared,
        )

    def _add_attributes(
        self, oid: int, columns: Iterable[CatalogColumnRow], required: frozenset[str]
    ) -> None:
        for number, column in enumerate(columns, start=1):
            shown = pg_type_of_spark(column.type)
            self._add_attribute(
                oid,
                column.name,
                shown.oid,
                number,
                atttypmod=shown.modifier,
                attndims=1 if shown.oid in ELEMENT_OF else 0,
                # Columns of a PRIMARY KEY are NOT NULL.
                attnotnull=not column.nullable or column.name in required,
                atthasdef=bool(column.default),
            )

    def _add_defaults(self, each: CatalogObjectRow, oid: int) -> None:
        for number, column in enumerate(each.columns, start=1):
            if column.default:
                self._add(
                    "pg_attrdef",
                    oid=self._oids.oid_of(each.id, f"default {number}"),
                    adrelid=oid,
                    adnum=number,
                    # The text of the expression, which `pg_get_expr` returns unchanged.
                    adbin=column.default,
                )

    def _add_system_attributes(self, oid: int) -> None:
        for name, type_oid, number in SYSTEM_ATTRIBUTES:
            self._add_attribute(oid, name, type_oid, number, attnotnull=True)

    def _add_attribute(
        self, oid: int, name: str, type_oid: int, number: int, **values: Any
    ) -> None:
        row = attribute_row(oid, number, name, self._types[type_oid])
        self._add("pg_attribute", **(row | values))

    def _add_comments(self, each: CatalogObjectRow, oid: int) -> None:
        numbered = [(0, each.comment)]
        numbered += [(at, column.comment) for at, column in enumerate(each.columns, start=1)]
        for number, text in numbered:
            if text:
                self._add(
                    "pg_description",
                    objoid=oid,
                    classoid=PG_CLASS_OID,
                    objsubid=number,
                    description=text,
                )

    def _add_key(self, each: CatalogObjectRow, oid: int) -> None:
        index = self._oids.oid_of(each.id, "key")
        name = f"{each.name}_pkey"
        numbers = self._add_index(
            each, index, name, each, each.key, indisunique=True, indisprimary=True
        )
        self._add(
            "pg_constraint",
            oid=self._oids.oid_of(each.id, "key constraint"),
            conname=name,
            connamespace=self._public,
            contype="p",
            convalidated=True,
            conrelid=oid,
            conindid=index,
            confupdtype=" ",
            confdeltype=" ",
            confmatchtype=" ",
            conislocal=True,
            connoinherit=True,
            conkey=numbers,
        )

    def _add_index_object(self, each: CatalogObjectRow) -> None:
        on = self._by_name.get(each.on.lower())
        # Hide an index on a hidden object, since pg_index could not refer to that object.
        if on is not None:
            oid = self._oids.oid_of(each.id)
            self._add_index(each, oid, each.name, on, each.index_columns)
            self._add_comments(each, oid)

    def _add_index(
        self,
        each: CatalogObjectRow,
        oid: int,
        name: str,
        on: CatalogObjectRow,
        columns: tuple[str, ...],
        **values: Any,
    ) -> list[int]:
        # Names are case-insensitive, as in Spark.
        places = {column.name.lower(): at for at, column in enumerate(on.columns)}
        numbers = [places[column.lower()] + 1 for column in columns if column.lower() in places]
        shown = [on.columns[number - 1] for number in numbers]
        types = [pg_type_of_spark(column.type).oid for column in shown]
        # The index of a key is not an object of the catalog, so make one for its row.
        index = CatalogObjectRow(id=each.id, name=name, kind="index")
        self._add_class(
            index,
            oid,
            relam=BTREE_METHOD,
            reltuples=0.0,
            relnatts=len(numbers),
            relreplident="n",
            relfilenode=oid,
        )
        for number, (column, type_oid) in enumerate(zip(shown, types, strict=True), start=1):
            modifier = pg_type_of_spark(column.type).modifier
            self._add_attribute(oid, column.name, type_oid, number, atttypmod=modifier)
        self._add(
            "pg_index",
            **{
                "indexrelid": oid,
                "indrelid": self._oids.oid_of(on.id),
                "indnatts": len(numbers),
                "indnkeyatts": len(numbers),
                "indimmediate": True,
                "indisunique": False,
                "indisvalid": True,
                "indisready": True,
                "indislive": True,
                "indkey": numbers,
                "indcollation": [self._types[each]["typcollation"] for each in types],
                "indclass": [self._operator_class(each) for each in types],
                "indoption": [0] * len(numbers),
                **values,
            },
        )
        return numbers

    def _operator_class(self, type_oid: int) -> int:
        """Return the OID of a type's btree operator class."""
        general = pg.ANYARRAY if type_oid in ELEMENT_OF else pg.TEXT
        # A type without an operator class still needs a row of pg_opclass for joins.
        return self._operator_classes.get(type_oid) or self._operator_classes[general]

    def _add_rule(self, each: CatalogObjectRow, oid: int) -> None:
        """Add a view's rule and, through it, the view's dependencies, as PostgreSQL does."""
        rule = self._oids.oid_of(each.id, "rule")
        self._add(
            "pg_rewrite",
            oid=rule,
            rulename="_RETURN",
            ev_class=oid,
            ev_type="1",
            ev_enabled="O",
            is_instead=True,
            ev_qual="<>",
            ev_action=each.sql,
        )
        of_rule = {"classid": PG_REWRITE_OID, "objid": rule, "refclassid": PG_CLASS_OID}
        self._add("pg_depend", **of_rule, refobjid=oid, deptype="i")
        self._add("pg_depend", **of_rule, refobjid=oid, deptype="n")
        for name in each.depends:
            # Skip dependencies on hidden objects.
            read = self._by_name.get(name.lower())
            if read is not None:
                self._add("pg_depend", **of_rule, refobjid=self._oids.oid_of(read.id), deptype="n")


def attribute_row(relation: int, number: int, name: str, kind: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `pg_attribute` for a column; `kind` is the `pg_type` row of its type."""
    return {
        "attrelid": relation,
        "attname": name,
        "atttypid": kind["oid"],
        "attstattarget": -1 if number > 0 else 0,
        "attlen": kind["typlen"],
        "attnum": number,
        "attcacheoff": -1,
        "atttypmod": -1,
        "attbyval": kind["typbyval"],
        "attalign": kind["typalign"],
        "attstorage": kind["typstorage"],
        "attislocal": True,
        "attcollation": kind["typcollation"],
    }

"""The rows of `pg_class`, `pg_attribute` and their like that show a snapshot. Pure.

Rows are named values; columns that are left out have their type's zero. What PostgreSQL would
write for a table, view or index of the same definition is written here, too, so that a client's
joins find what they look for: an index's operator classes, a view's rule, a relation's row type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from actors.doors.postgres.pg_catalog.catalog_snapshot import (
    CatalogColumnRow,
    CatalogObjectRow,
    OidAssignment,
    PgCatalogSnapshot,
    object_oid,
)
from actors.doors.postgres.pg_catalog.pg_types import ELEMENT_OF
from actors.model.pgwire.type_map import pg_type_of_spark
from actors.model.pgwire.type_oids import (
    BOOL,
    BPCHAR,
    BYTEA,
    CID,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    NAME,
    NUMERIC,
    OID,
    TEXT,
    TID,
    TIMESTAMP,
    TIMESTAMPTZ,
    VARCHAR,
    XID,
)

CatalogRows = dict[str, list[dict[str, Any]]]
"""Rows of each table of `pg_catalog`."""

SUPERUSER_OID: Final = 10
PG_CLASS_OID: Final = 1259
PG_REWRITE_OID: Final = 2618
PG_DATABASE_OID: Final = 1262
HEAP_METHOD: Final = 2
BTREE_METHOD: Final = 403
DEFAULT_COLLATION: Final = 100
C_COLLATION: Final = 950
UTF8_ENCODING: Final = 6
_RELKINDS: Final = {
    "table": "r",
    "materialized view": "m",
    "view": "v",
    "source": "f",
    "sink": "f",
    "index": "i",
}
_OPERATOR_CLASSES: Final = {
    BOOL: 424,
    BYTEA: 428,
    INT2: 1979,
    INT4: 1978,
    INT8: 3124,
    FLOAT4: 1970,
    FLOAT8: 3123,
    NUMERIC: 3125,
    BPCHAR: 426,
    DATE: 3122,
    TIMESTAMP: 3128,
    TIMESTAMPTZ: 3127,
}
"""The btree operator class of each type that has one; arrays have another, texts the rest."""
_ARRAY_OPERATOR_CLASS: Final = 397
_TEXT_OPERATOR_CLASS: Final = 3126
SYSTEM_ATTRIBUTES: Final = (
    ("tableoid", OID, -6),
    ("cmax", CID, -5),
    ("xmax", XID, -4),
    ("cmin", CID, -3),
    ("xmin", XID, -2),
    ("ctid", TID, -1),
)
"""Columns that every stored relation of PostgreSQL has; clients read them to tell rows apart."""
_TYPE_SHAPES: Final[dict[int, tuple[int, bool, str, str]]] = {
    BOOL: (1, True, "c", "p"),
    BYTEA: (-1, False, "i", "x"),
    NAME: (64, False, "c", "p"),
    INT8: (8, True, "d", "p"),
    INT2: (2, True, "s", "p"),
    INT4: (4, True, "i", "p"),
    OID: (4, True, "i", "p"),
    TID: (6, False, "s", "p"),
    XID: (4, True, "i", "p"),
    CID: (4, True, "i", "p"),
    FLOAT4: (4, True, "i", "p"),
    FLOAT8: (8, True, "d", "p"),
    NUMERIC: (-1, False, "i", "m"),
    DATE: (4, True, "i", "p"),
    TIMESTAMP: (8, True, "d", "p"),
    TIMESTAMPTZ: (8, True, "d", "p"),
}
"""Length, pass by value, alignment and storage of a type; all others are of variable length."""
_VARIABLE: Final = (-1, False, "i", "x")


class SnapshotRows:
    """Makes the rows of one snapshot; `rows` holds them."""

    def __init__(self, snapshot: PgCatalogSnapshot, namespaces: Mapping[str, int]) -> None:
        self._snapshot = snapshot
        self._namespaces = dict(namespaces)
        self._oids = OidAssignment(snapshot.objects)
        self._roles: dict[str, int] = {}
        self._by_name: dict[tuple[str, str], CatalogObjectRow] = {}
        self._indexed = {
            (each.schema, each.on.lower()) for each in snapshot.objects if each.kind == "index"
        }
        self.rows: CatalogRows = {}
        for each in snapshot.objects:
            # Indexes and connectors have names of their own kind: they shadow no relation.
            if each.kind in ("table", "materialized view", "view"):
                self._by_name[each.schema, each.name.lower()] = each
        self._add_roles()
        self._add_namespaces()
        self._add_database()
        # Roles and schemas first: objects refer to them.
        for each in snapshot.objects:
            self._add_object(each)

    def owner_of(self, owned: CatalogObjectRow) -> int:
        """Return the OID of the role that owns an object."""
        return self._roles.get(owned.owner, SUPERUSER_OID)

    def _add(self, table: str, **values: Any) -> None:
        self.rows.setdefault(table, []).append(values)

    def _add_roles(self) -> None:
        first = next((each for each in self._snapshot.roles if each.superuser), None)
        for role in self._snapshot.roles:
            # The first superuser is PostgreSQL's bootstrap role, which owns all system objects.
            oid = SUPERUSER_OID if role is first else object_oid(role.name, "role")
            self._roles[role.name] = oid
            self._add(
                "pg_authid",
                oid=oid,
                rolname=role.name,
                rolsuper=role.superuser,
                rolinherit=True,
                rolcreaterole=role.create_role or role.superuser,
                rolcreatedb=role.create_database or role.superuser,
                rolcanlogin=role.can_login,
                rolreplication=role is first,
                rolbypassrls=role is first,
                rolconnlimit=-1,
                rolpassword=None,
                rolvaliduntil=None,
            )
        for role in self._snapshot.roles:
            for group in role.member_of:
                if group in self._roles:
                    self._add(
                        "pg_auth_members",
                        roleid=self._roles[group],
                        member=self._roles[role.name],
                        grantor=SUPERUSER_OID,
                        admin_option=False,
                    )

    def _add_namespaces(self) -> None:
        for schema in sorted({each.schema for each in self._snapshot.objects}):
            if schema not in self._namespaces:
                oid = self._namespaces[schema] = object_oid(schema, "schema")
                self._add("pg_namespace", oid=oid, nspname=schema, nspowner=SUPERUSER_OID)

    def _add_database(self) -> None:
        oid = object_oid(self._snapshot.database, "database")
        self._add(
            "pg_database",
            oid=oid,
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
            daticulocale=None,
            datcollversion=None,
            datacl=None,
        )
        if self._snapshot.database_comment:
            self._add(
                "pg_shdescription",
                objoid=oid,
                classoid=PG_DATABASE_OID,
                description=self._snapshot.database_comment,
            )

    def _add_object(self, each: CatalogObjectRow) -> None:
        if each.kind == "index":
            self._add_index_object(each)
            return
        if each.kind in ("source", "sink"):
            self._add_connector(each)
            # Without columns there is nothing to read.
            if not each.columns:
                return
        oid = self._oids.oid_of(each.id)
        stored = each.kind in ("table", "materialized view")
        indexed = bool(each.key) or (each.schema, each.name.lower()) in self._indexed
        row_type = self._oids.oid_of(each.id, "type")
        self._add_class(
            each,
            oid,
            reltype=row_type,
            relam=HEAP_METHOD if stored else 0,
            relhasindex=stored and indexed,
            relhasrules="view" in each.kind,
            relnatts=len(each.columns),
            # As PostgreSQL writes it for what has rows of its own.
            relreplident="d" if stored else "n",
            relfrozenxid=1 if stored else 0,
            relminmxid=1 if stored else 0,
            relfilenode=oid if stored else 0,
        )
        # Clients find a relation's columns through its type, too.
        self._add_row_type(each, oid, row_type)
        self._add_attributes(oid, each.columns, frozenset(each.key))
        self._add_defaults(each, oid)
        if stored or each.kind in ("source", "sink"):
            self._add_system_attributes(oid)
        self._add_comments(each, oid)
        # A view has no key in PostgreSQL.
        if each.key and stored:
            self._add_key(each, oid)
        if "view" in each.kind:
            self._add_rule(each, oid)

    def _add_class(self, each: CatalogObjectRow, oid: int, **values: Any) -> None:
        row = {
            "oid": oid,
            "relname": each.name,
            "relnamespace": self._namespaces[each.schema],
            "relowner": self.owner_of(each),
            "relkind": _RELKINDS[each.kind],
            # 15 writes -1 where the number of rows was never estimated.
            "reltuples": float(each.rows) if each.kind != "view" else -1.0,
            "relpages": 0,
            "relpersistence": "p",
            "relispopulated": True,
            "relacl": None,
            "reloptions": None,
            "relpartbound": None,
        }
        self._add("pg_class", **(row | values))

    def _add_row_type(self, each: CatalogObjectRow, oid: int, row_type: int) -> None:
        array_type = self._oids.oid_of(each.id, "array type")
        shared = {
            "typnamespace": self._namespaces[each.schema],
            "typowner": self.owner_of(each),
            "typlen": -1,
            "typbyval": False,
            "typisdefined": True,
            "typdelim": ",",
            "typalign": "d",
            "typstorage": "x",
            "typtypmod": -1,
            "typdefaultbin": None,
            "typdefault": None,
            "typacl": None,
        }
        # The functions are record_in and array_in with their kin, as in PostgreSQL.
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
                # Columns of a PRIMARY KEY are never NULL.
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
                    # The expression itself, which `pg_get_expr` returns as it is.
                    adbin=column.default,
                )

    def _add_system_attributes(self, oid: int) -> None:
        for name, type_oid, number in SYSTEM_ATTRIBUTES:
            self._add_attribute(oid, name, type_oid, number, attnotnull=True)

    def _add_attribute(
        self, oid: int, name: str, type_oid: int, number: int, **values: Any
    ) -> None:
        length, by_value, alignment, storage = _TYPE_SHAPES.get(type_oid, _VARIABLE)
        row = {
            "attrelid": oid,
            "attname": name,
            "atttypid": type_oid,
            "attstattarget": -1 if number > 0 else 0,
            "attlen": length,
            "attnum": number,
            "attcacheoff": -1,
            "atttypmod": -1,
            "attbyval": by_value,
            "attalign": alignment,
            "attstorage": storage,
            "attislocal": True,
            "attcollation": collation_of(type_oid),
            "attacl": None,
            "attoptions": None,
            "attfdwoptions": None,
            "attmissingval": None,
        }
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
            connamespace=self._namespaces[each.schema],
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
            **dict.fromkeys(
                (
                    "confkey",
                    "conpfeqop",
                    "conppeqop",
                    "conffeqop",
                    "confdelsetcols",
                    "conexclop",
                    "conbin",
                )
            ),
        )

    def _add_index_object(self, each: CatalogObjectRow) -> None:
        on = self._by_name.get((each.schema, each.on.lower()))
        # An index on what is not shown cannot be shown either: pg_index would name nothing.
        if on is not None:
            oid = self._oids.oid_of(each.id)
            self._add_index(each, oid, each.name, on, each.index_columns, indisunique=each.unique)
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
        # Names are compared without regard to case, as Spark does.
        places = {column.name.lower(): at for at, column in enumerate(on.columns)}
        numbers = [places[column.lower()] + 1 for column in columns if column.lower() in places]
        shown = [on.columns[number - 1] for number in numbers]
        types = [pg_type_of_spark(column.type).oid for column in shown]
        # The key's index is no object of the catalog's: it gets its row from one made here.
        index = CatalogObjectRow(id=each.id, name=name, kind="index", schema=on.schema)
        self._add_class(
            index,
            oid,
            relam=BTREE_METHOD,
            relowner=self.owner_of(on),
            reltuples=0.0 if on.rows < 0 else float(on.rows),
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
                "indisvalid": True,
                "indisready": True,
                "indislive": True,
                "indkey": numbers,
                "indcollation": [collation_of(each) for each in types],
                "indclass": [_operator_class(each) for each in types],
                "indoption": [0] * len(numbers),
                "indexprs": None,
                "indpred": None,
                **values,
            },
        )
        return numbers

    def _add_rule(self, each: CatalogObjectRow, oid: int) -> None:
        """Add a view's rule, and through it what the view depends on, as PostgreSQL does."""
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
            # What is not shown cannot be depended on.
            read = self._by_name.get((each.schema, name.lower()))
            if read is not None:
                self._add("pg_depend", **of_rule, refobjid=self._oids.oid_of(read.id), deptype="n")

    def _add_connector(self, each: CatalogObjectRow) -> None:
        """Add a source or sink as a foreign server, whose wrapper is named for its kind."""
        wrapper_name = f"penstock_{each.kind}"
        wrapper = object_oid(wrapper_name, "wrapper")
        wrappers = self.rows.get("pg_foreign_data_wrapper", [])
        if all(row["oid"] != wrapper for row in wrappers):
            self._add(
                "pg_foreign_data_wrapper",
                oid=wrapper,
                fdwname=wrapper_name,
                fdwowner=SUPERUSER_OID,
                fdwacl=None,
                fdwoptions=None,
            )
        server = self._oids.oid_of(each.id, "server")
        self._add(
            "pg_foreign_server",
            oid=server,
            srvname=each.name,
            srvowner=self.owner_of(each),
            srvfdw=wrapper,
            srvtype=each.kind,
            srvversion=None,
            srvacl=None,
            srvoptions=None,
        )
        if each.columns:
            self._add(
                "pg_foreign_table",
                ftrelid=self._oids.oid_of(each.id),
                ftserver=server,
                ftoptions=None,
            )


def collation_of(type_oid: int) -> int:
    """Return the collation of a type's values; 0 for a type without one."""
    element = ELEMENT_OF.get(type_oid, type_oid)
    if element == NAME:
        return C_COLLATION
    return DEFAULT_COLLATION if element in (TEXT, VARCHAR, BPCHAR) else 0


def _operator_class(type_oid: int) -> int:
    if type_oid in ELEMENT_OF:
        return _ARRAY_OPERATOR_CLASS
    # A type without an order of its own still needs a row of pg_opclass that joins find.
    return _OPERATOR_CLASSES.get(type_oid, _TEXT_OPERATOR_CLASS)

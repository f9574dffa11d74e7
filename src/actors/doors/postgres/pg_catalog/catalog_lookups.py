"""Looks up names and definitions of catalog objects by OID, and OIDs by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from actors.doors.postgres.pg_catalog.catalog_data import SystemCatalog
from actors.doors.postgres.pg_catalog.catalog_errors import (
    INVALID_SCHEMA,
    NOT_SUPPORTED,
    SYNTAX_ERROR,
    UNDEFINED_FUNCTION,
    UNDEFINED_OBJECT,
    UNDEFINED_TABLE,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.pg_types import TYPE_SYNONYMS, format_type
from actors.doors.postgres.pg_catalog.snapshot_rows import CatalogRows
from actors.model.pgwire import type_oids as pg
from actors.model.pgwire.quoting import quote_identifier

CATALOG_NAMESPACE: Final = 11
_NAME_PART: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\s".(]+))\s*(\.?)')
DEFAULT_SEARCH_PATH: Final = '"$user", public'


class NamedObject(msgspec.Struct, frozen=True):
    """The name of an object, and the OID of its namespace (0 if it has none)."""

    name: str
    namespace: int = 0
    kind: str = ""


class IndexDefinition(msgspec.Struct, frozen=True):
    """An index on columns of a relation."""

    relation: int
    columns: tuple[str, ...]
    unique: bool


class KeyDefinition(msgspec.Struct, frozen=True):
    """A PRIMARY KEY or UNIQUE constraint."""

    columns: tuple[str, ...]
    primary: bool


def split_name(text: str) -> list[str]:
    """Split a qualified name into its parts. Unquoted parts become lower-case. Raises
    `CatalogQueryError`.

    >>> split_name('public."My Table"'), split_name("PG_CLASS")
    (['public', 'My Table'], ['pg_class'])
    """
    parts, at = [], 0
    while at < len(text):
        found = _NAME_PART.match(text, at)
        if found is None:
            raise CatalogQueryError(f'invalid name syntax: "{text}"', SYNTAX_ERROR)
        parts.append(found[1].replace('""', '"') if found[1] else found[2].lower())
        at = found.end()
        if not found[3]:
            break
    if not parts or text[at:].strip():
        raise CatalogQueryError(f'invalid name syntax: "{text}"', SYNTAX_ERROR)
    return parts


class CatalogLookups:
    """Finds objects of the data file and of the current snapshot, by OID and by name."""

    def __init__(self, system: SystemCatalog) -> None:
        self.search_path: tuple[str, ...] = ("pg_catalog", "public")
        self._system = system
        self.namespaces: dict[int, str] = {}
        self.relations: dict[int, NamedObject] = {}
        self.types: dict[int, NamedObject] = {}
        self.functions: dict[int, dict[str, Any]] = {
            row["oid"]: row for row in system.rows["pg_proc"].records()
        }
        self.roles: dict[int, str] = {}
        self.views: dict[int, str] = {}
        self.indexes: dict[int, IndexDefinition] = {}
        self.keys: dict[int, KeyDefinition] = {}
        self.columns: dict[int, tuple[str, ...]] = {}
        self._others = {
            table: {
                row["oid"]: NamedObject(row[name], row.get(namespace) or 0)
                for row in system.rows[table].records()
            }
            for table, name, namespace in (
                ("pg_operator", "oprname", "oprnamespace"),
                ("pg_collation", "collname", "collnamespace"),
                ("pg_ts_config", "cfgname", "cfgnamespace"),
                ("pg_ts_dict", "dictname", "dictnamespace"),
            )
        }
        self._functions_by_name: dict[str, list[int]] = {}
        for oid, row in self.functions.items():
            self._functions_by_name.setdefault(row["proname"], []).append(oid)
        self._by_name: dict[str, dict[tuple[str, int], int]] = {}

    def fill(self, rows: CatalogRows) -> None:
        """Replace the objects of the previous snapshot by those of a new one."""
        self.namespaces = {
            row["oid"]: row["nspname"] for row in self._all_rows("pg_namespace", rows)
        }
        self.roles = {row["oid"]: row["rolname"] for row in self._all_rows("pg_authid", rows)}
        self.relations = {
            row["oid"]: NamedObject(row["relname"], row["relnamespace"], row["relkind"])
            for row in self._all_rows("pg_class", rows)
        }
        self.types = {
            row["oid"]: NamedObject(row["typname"], row["typnamespace"], row["typtype"])
            for row in self._all_rows("pg_type", rows)
        }
        self._fill_definitions(rows)
        self._by_name = {
            # In reverse order, so that the first of several equal names wins.
            kind: {(each.name, each.namespace): oid for oid, each in reversed(held.items())}
            for kind, held in (("relation", self.relations), ("type", self.types))
        }

    def _all_rows(self, table: str, rows: CatalogRows) -> Iterable[dict[str, Any]]:
        yield from self._system.rows[table].records()
        yield from rows.get(table, ())

    def _fill_definitions(self, rows: CatalogRows) -> None:
        self.views = {row["ev_class"]: row["ev_action"] for row in rows.get("pg_rewrite", ())}
        columns: dict[int, list[str]] = {}
        for row in rows.get("pg_attribute", ()):
            if row["attnum"] > 0:
                columns.setdefault(row["attrelid"], []).append(row["attname"])
        # The snapshot's rows do not include columns of system relations.
        for shape in self._system.relations:
            columns[shape.oid] = [column.name for column in shape.columns]
        self.columns = {oid: tuple(names) for oid, names in columns.items()}
        self.indexes, self.keys = {}, {}
        for row in self._all_rows("pg_index", rows):
            names = self._names_of(row["indrelid"], row["indkey"])
            unique = bool(row["indisunique"])
            self.indexes[row["indexrelid"]] = IndexDefinition(row["indrelid"], names, unique)
        for row in self._all_rows("pg_constraint", rows):
            if row["contype"] in ("p", "u"):
                names = self._names_of(row["conrelid"], row["conkey"])
                self.keys[row["oid"]] = KeyDefinition(names, row["contype"] == "p")

    def _names_of(self, relation: int, numbers: Sequence[int] | None) -> tuple[str, ...]:
        names = self.columns.get(relation, ())
        return tuple(names[at - 1] for at in numbers or () if 0 < at <= len(names))

    # -- OID to name ---------------------------------------------------------------------------

    def visible_namespaces(self) -> list[int]:
        """Return the existing namespaces of the search path, in order."""
        by_name = {name: oid for oid, name in self.namespaces.items()}
        return [by_name[name] for name in self.search_path if name in by_name]

    def is_visible(self, held: dict[int, NamedObject], oid: int) -> bool | None:
        """Return whether an object's unqualified name finds it; None if it does not exist."""
        found = held.get(oid)
        if found is None:
            return None
        by_name = self._by_name["relation" if held is self.relations else "type"]
        for namespace in self.visible_namespaces():
            other = by_name.get((found.name, namespace))
            # The first object of this name in the path hides the others.
            if other is not None:
                return other == oid
        return False

    def shown_name(self, held: dict[int, NamedObject], oid: int) -> str | None:
        """Return an object's quoted name, qualified unless it is visible; None if it does not
        exist."""
        found = held.get(oid)
        if found is None:
            return None
        name = quote_identifier(found.name)
        if self.is_visible(held, oid):
            return name
        return f"{quote_identifier(self.namespaces.get(found.namespace, ''))}.{name}"

    def type_text(self, oid: int, modifier: int | None = None) -> str:
        """Return a type's name as PostgreSQL's `format_type` does."""
        found = self.types.get(oid)
        if found is not None and found.name.startswith("_") and oid >= 16_384:
            # An array of a relation's rows is not a built-in type.
            element = self.find_type_name(found.name[1:], found.namespace)
            if element:
                return self.type_text(element, modifier) + "[]"
        return format_type(oid, modifier, lambda each: self.shown_name(self.types, each))

    def find_type_name(self, name: str, namespace: int) -> int:
        """Return the OID of a type by its name in a namespace; 0 if it does not exist."""
        return self._by_name["type"].get((name, namespace), 0)

    def qualified_relation(self, oid: int) -> str:
        """Return a relation's qualified name; "" if it is unknown."""
        found = self.relations.get(oid)
        if found is None:
            return ""
        schema = quote_identifier(self.namespaces.get(found.namespace, ""))
        return f"{schema}.{quote_identifier(found.name)}"

    def arguments_text(self, oid: int, *, names: bool) -> str:
        """Return a function's parameters as `pg_get_function_arguments` does; with `names` False,
        only the types of its input parameters."""
        row = self.functions[oid]
        types = row.get("proallargtypes") or row["proargtypes"]
        modes = row.get("proargmodes") or ["i"] * len(types)
        named = row.get("proargnames") or [""] * len(types)
        words = {"i": "", "o": "OUT ", "b": "INOUT ", "v": "VARIADIC "}
        texts = []
        for type_oid, mode, name in zip(types, modes, named, strict=False):
            # Columns of a returned table are not parameters.
            if mode == "t" or (not names and mode == "o"):
                continue
            shown = f"{quote_identifier(name)} " if name and names else ""
            texts.append(f"{words[mode]}{shown}{self.type_text(type_oid)}")
        return ", ".join(texts)

    def result_text(self, oid: int) -> str:
        """Return a function's result as `pg_get_function_result` does."""
        row = self.functions[oid]
        modes = row.get("proargmodes") or []
        if "t" in modes:
            columns = zip(row["proallargtypes"], modes, row.get("proargnames") or [], strict=False)
            inside = ", ".join(
                f"{quote_identifier(name)} {self.type_text(each)}"
                for each, mode, name in columns
                if mode == "t"
            )
            return f"TABLE({inside})"
        text = self.type_text(row["prorettype"])
        return f"SETOF {text}" if row["proretset"] else text

    def registered_name(self, type_oid: int, oid: int) -> str:
        """Return the text of a value of a type such as `regclass`."""
        # Zero means no object.
        if oid == 0:
            return "-"
        shown: str | None
        if type_oid == pg.REGCLASS:
            shown = self.shown_name(self.relations, oid)
        elif type_oid == pg.REGTYPE:
            shown = self.type_text(oid) if oid in self.types else None
        elif type_oid in (pg.REGPROC, pg.REGPROCEDURE):
            shown = self._function_name(type_oid, oid)
        elif type_oid in (pg.REGNAMESPACE, pg.REGROLE):
            names = self.namespaces if type_oid == pg.REGNAMESPACE else self.roles
            shown = quote_identifier(names[oid]) if oid in names else None
        else:
            table = _OTHER_TABLES.get(type_oid, "pg_operator")
            other = self._others[table].get(oid)
            shown = None
            if other is not None:
                plain = table == "pg_operator"
                shown = other.name if plain else quote_identifier(other.name)
        return str(oid) if shown is None else shown

    def _function_name(self, type_oid: int, oid: int) -> str | None:
        row = self.functions.get(oid)
        if row is None:
            return None
        name = quote_identifier(row["proname"])
        if row["pronamespace"] != CATALOG_NAMESPACE:
            name = f"{quote_identifier(self.namespaces[row['pronamespace']])}.{name}"
        if type_oid == pg.REGPROC:
            return name
        return f"{name}({','.join(self.type_text(each) for each in row['proargtypes'])})"

    # -- name to OID ---------------------------------------------------------------------------

    def find_registered(self, type_oid: int, text: str) -> int | None:
        """Return the OID for a text that is cast to a type such as `regclass`; None if no object
        has this name. Raises `CatalogQueryError` for an invalid name."""
        stripped = text.strip()
        if stripped == "-":
            return 0
        # A number is an OID, even if no object has it.
        if stripped.isdecimal():
            return int(stripped)
        if type_oid == pg.REGTYPE:
            return self._find_type(stripped)
        if type_oid in (pg.REGPROC, pg.REGPROCEDURE):
            return self._find_function(stripped, exact=type_oid == pg.REGPROCEDURE)
        if type_oid in (pg.REGOPER, pg.REGOPERATOR):
            raise CatalogQueryError(
                f'casting operator name "{text}" to an OID is not supported', NOT_SUPPORTED
            )
        parts = split_name(stripped)
        if type_oid in (pg.REGNAMESPACE, pg.REGROLE):
            names = self.namespaces if type_oid == pg.REGNAMESPACE else self.roles
            return next((oid for oid, name in names.items() if [name] == parts), None)
        if type_oid == pg.REGCLASS:
            return self.find_relation(parts)
        held = self._others[_OTHER_TABLES[type_oid]]
        return next((oid for oid, each in held.items() if each.name == parts[-1]), None)

    def find_relation(self, parts: Sequence[str]) -> int | None:
        """Return the OID of a relation by the parts of its name; None if it does not exist."""
        by_name = self._by_name["relation"]
        if len(parts) == 1:
            # Unlike in a query, the name may also be that of an index.
            found = (by_name.get((parts[0], each)) for each in self.visible_namespaces())
            return next((oid for oid in found if oid is not None), None)
        namespace = self._namespace(parts[-2])
        return by_name.get((parts[-1], namespace))

    def _namespace(self, name: str) -> int:
        return next((oid for oid, each in self.namespaces.items() if each == name), -1)

    def _find_type(self, text: str) -> int | None:
        base = re.sub(r"\s*\([\d\s,]*\)", "", text)
        # The number of dimensions does not matter: text[][] is text[].
        arrays = base.endswith("[]")
        base = re.sub(r"(\s*\[\d*\])+$", "", base).strip()
        low = " ".join(base.lower().split())
        # The name of an array type is that of its element type with a leading underscore.
        prefix = "_" if arrays else ""
        by_name = self._by_name["type"]
        synonym = TYPE_SYNONYMS.get(low)
        if synonym is not None:
            return by_name.get((prefix + synonym, CATALOG_NAMESPACE))
        parts = split_name(base)
        spaces = self.visible_namespaces() if len(parts) == 1 else [self._namespace(parts[-2])]
        found = (by_name.get((prefix + parts[-1], each)) for each in spaces)
        return next((oid for oid in found if oid is not None), None)

    def _find_function(self, text: str, *, exact: bool) -> int | None:
        name, _, arguments = text.partition("(")
        found = self._functions_by_name.get(split_name(name)[-1], [])
        if not exact:
            # `regproc` has no arguments, so the name must be unique.
            if len(found) > 1:
                raise CatalogQueryError(f'more than one function named "{text}"', "42725")
            return found[0] if found else None
        wanted = [
            self._find_type(each) for each in arguments.rstrip(") ").split(",") if each.strip()
        ]
        return next((oid for oid in found if self.functions[oid]["proargtypes"] == wanted), None)

    def missing_error(self, type_oid: int, text: str) -> CatalogQueryError:
        """Return the error for a name that no object has."""
        kind, state = {
            pg.REGCLASS: ("relation", UNDEFINED_TABLE),
            pg.REGTYPE: ("type", UNDEFINED_OBJECT),
            pg.REGPROC: ("function", UNDEFINED_FUNCTION),
            pg.REGPROCEDURE: ("function", UNDEFINED_FUNCTION),
            pg.REGNAMESPACE: ("schema", INVALID_SCHEMA),
            pg.REGROLE: ("role", UNDEFINED_OBJECT),
        }.get(type_oid, ("object", UNDEFINED_OBJECT))
        return CatalogQueryError(f'{kind} "{text}" does not exist', state)

    def role_oid(self, name: str) -> int:
        """Return the OID of a role; 0 for PUBLIC and for an unknown role."""
        return next((oid for oid, each in self.roles.items() if each == name), 0)


_OTHER_TABLES: Final = {
    pg.REGOPER: "pg_operator",
    pg.REGOPERATOR: "pg_operator",
    pg.REGCOLLATION: "pg_collation",
    pg.REGCONFIG: "pg_ts_config",
    pg.REGDICTIONARY: "pg_ts_dict",
}

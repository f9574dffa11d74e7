"""PostgreSQL's functions on the catalog and the session, which SQLite calls.

Arguments and results are values as SQLite stores them: OIDs for `regclass`, 0 and 1 for Booleans,
JSON for arrays. Where PostgreSQL overloads a function for an OID and for a name, the type of the
argument decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from actors.doors.postgres.pg_catalog.catalog_data import SystemCatalog
from actors.doors.postgres.pg_catalog.catalog_errors import (
    INSUFFICIENT_PRIVILEGE,
    NOT_SUPPORTED,
    UNDEFINED_OBJECT,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.catalog_lookups import (
    DEFAULT_SEARCH_PATH,
    CatalogLookups,
    split_name,
)
from actors.doors.postgres.pg_catalog.catalog_snapshot import (
    CatalogSession,
    SessionSignal,
    object_oid,
)
from actors.doors.postgres.pg_catalog.scalar_functions import default_privileges, explode_privileges
from actors.doors.postgres.pg_catalog.typed_sql import array_json
from actors.model.pgwire import type_oids as pg
from actors.model.pgwire.quoting import quote_identifier

_TABLE_UPDATES: Final = 28
"""The bits of `pg_relation_is_updatable` for INSERT, UPDATE and DELETE."""


class CatalogFunctions:
    """The functions of one database, called on behalf of one session at a time."""

    def __init__(self, system: SystemCatalog) -> None:
        self.lookups = CatalogLookups(system)
        self.session = CatalogSession()
        self.database = ""
        self.sessions: tuple[CatalogSession, ...] = ()
        """All connected sessions; the asking one is added to the answer if it is missing."""
        # Effects of the current query, which the connection applies afterwards.
        self.settings_set: list[tuple[str, str | None, bool]] = []
        """Name, value (None: the default) and `is_local` of each call of `set_config`."""
        self.signals: list[SessionSignal] = []
        """Sessions to end or to cancel."""
        self.warnings: list[str] = []
        self._version = system.version
        self._keywords = list(system.keywords.records())
        settings = system.rows["pg_settings"]
        self._defaults = dict(
            zip(settings.values_of("name"), settings.values_of("setting"), strict=True)
        )
        self._spelled = {name.lower(): name for name in self._defaults}

    def enter(self, session: CatalogSession) -> None:
        """Start a query of this session."""
        self.session = session
        self.settings_set, self.signals, self.warnings = [], [], []
        path = self.setting("search_path") or DEFAULT_SEARCH_PATH
        names = [part.strip().strip('"') for part in path.split(",")]
        shown = [session.user if name == "$user" else name for name in names if name]
        # PostgreSQL searches pg_catalog first unless the path names it.
        self.lookups.search_path = tuple(shown if "pg_catalog" in shown else ["pg_catalog", *shown])

    # -- the session ---------------------------------------------------------------------------

    def setting(self, name: str) -> str | None:
        """Return a setting's value; None if it is unknown."""
        low = name.lower()
        # The session's settings come first, then this service's, then PostgreSQL's defaults.
        if low in self.session.settings:
            return self.session.settings[low]
        if low in _OWN_SETTINGS:
            return _OWN_SETTINGS[low]
        value = self._defaults.get(self._spelled.get(low, name))
        return None if value is None else str(value)

    def _current_setting(self, name: str, missing_ok: int = 0) -> str | None:
        value = self.setting(name)
        if value is None and not missing_ok:
            raise CatalogQueryError(
                f'unrecognized configuration parameter "{name}"', UNDEFINED_OBJECT
            )
        return value

    def _session_rows(self) -> str:
        """Return the rows of `pg_stat_activity`."""
        # Always include the asking session: clients look for their own row.
        asking = self.session.process_id
        others = [each for each in self.sessions if each.process_id != asking]
        database = object_oid(self.database, "database")
        return array_json(
            {
                "datid": database,
                "datname": self.database,
                "pid": each.process_id,
                "usesysid": self.lookups.role_oid(each.user),
                "usename": each.user,
                "application_name": each.settings.get("application_name", ""),
                "client_addr": each.client_address or None,
                "client_port": each.client_port or None,
                "backend_start": each.connected or None,
                "query_start": each.now or None,
                "state": each.state or None,
                "query": each.query,
            }
            for each in (self.session, *others)
        )

    def _set_config(self, name: str, value: str | None, local: int = 0) -> str:
        # The connection applies the setting afterwards.
        self.settings_set.append((name.lower(), value, bool(local)))
        return value or ""

    def _terminate(self, pid: int | None, timeout: int = 0) -> int | None:
        if timeout:
            raise CatalogQueryError(
                "pg_terminate_backend with a timeout is not supported: omit the timeout",
                NOT_SUPPORTED,
            )
        return self._signal(pid, end=True)

    def _signal(self, pid: int | None, *, end: bool) -> int | None:
        """Request that a session be canceled or ended. Return whether it exists."""
        # The function is strict.
        if pid is None:
            return None
        found = next((each for each in self.sessions if each.process_id == pid), None)
        if found is None:
            self.warnings.append(f"PID {pid} is not a session of this service")
            return 0
        if not found.may_signal:
            raise CatalogQueryError(
                f"permission denied to {'terminate' if end else 'cancel'} session {pid}: only an "
                "administrator may do so for another role's session",
                INSUFFICIENT_PRIVILEGE,
            )
        # The connection sends the signal afterwards.
        self.signals.append(SessionSignal(pid, end))
        return 1

    def _version_text(self) -> str:
        return f"PostgreSQL {self._version} (Penstock)"

    def _current_schemas(self, implicit: int) -> str:
        names = {self.lookups.namespaces[oid] for oid in self.lookups.visible_namespaces()}
        path = [name for name in self.lookups.search_path if name in names]
        return array_json(path if implicit else [each for each in path if each != "pg_catalog"])

    def _current_schema(self) -> str | None:
        names: list[str] = json.loads(self._current_schemas(0))
        return names[0] if names else None

    # -- names and definitions -----------------------------------------------------------------

    def _read_registered(self, type_oid: int, text: Any) -> int:
        # An argument that was already cast is an OID.
        if isinstance(text, int):
            return text
        found = self.lookups.find_registered(type_oid, text)
        if found is None:
            raise self.lookups.missing_error(type_oid, text)
        return found

    def _find_registered(self, type_oid: int, text: str) -> int | None:
        return self.lookups.find_registered(type_oid, text)

    def _array_of_registered(self, array: str, type_oid: int) -> str:
        return array_json(self._read_registered(type_oid, each) for each in json.loads(array))

    def _array_of_names(self, array: str, type_oid: int) -> str:
        return array_json(
            None if each is None else self.lookups.registered_name(type_oid, each)
            for each in json.loads(array)
        )

    def _format_type(self, oid: int | None, modifier: int | None) -> str | None:
        return None if oid is None else self.lookups.type_text(oid, modifier)

    def _relation_oid(self, relation: Any) -> int:
        return self._read_registered(pg.REGCLASS, relation)

    def _view_definition(self, view: Any, _pretty: Any = 0) -> str | None:
        text = self.lookups.views.get(self._relation_oid(view))
        if text is None:
            return None
        # Like PostgreSQL, start with a space and end with a semicolon, which some clients expect.
        return f" {text.strip().rstrip(';')};"

    def _index_definition(self, oid: int, number: int = 0, pretty: int = 0) -> str | None:
        index = self.lookups.indexes.get(oid)
        if index is None:
            return None
        columns = [quote_identifier(name) for name in index.columns]
        # psql and JDBC ask for a single column of the index.
        if number:
            return columns[number - 1] if 0 < number <= len(columns) else ""
        unique = "UNIQUE " if index.unique else ""
        name = quote_identifier(self.lookups.relations[oid].name)
        # The pretty form omits the schema if the relation is in the search path.
        on = (
            self._describe_relation(index.relation)
            if pretty
            else self.lookups.qualified_relation(index.relation)
        )
        return f"CREATE {unique}INDEX {name} ON {on} USING btree ({', '.join(columns)})"

    def _constraint_definition(self, oid: int, _pretty: int = 0) -> str | None:
        found = self.lookups.keys.get(oid)
        if found is None:
            return None
        names = ", ".join(quote_identifier(name) for name in found.columns)
        return f"{'PRIMARY KEY' if found.primary else 'UNIQUE'} ({names})"

    def _rule_definition(self, _oid: int, _pretty: int = 0) -> str | None:
        return None

    def _role_name(self, oid: int) -> str:
        return self.lookups.roles.get(oid) or f"unknown (OID={oid})"

    def _function_visible(self, oid: int) -> int | None:
        row = self.lookups.functions.get(oid)
        return (
            None
            if row is None
            else int(self.lookups.namespaces.get(row["pronamespace"]) in self.lookups.search_path)
        )

    def _function_arguments(self, oid: int) -> str | None:
        known = oid in self.lookups.functions
        return self.lookups.arguments_text(oid, names=True) if known else None

    def _function_result(self, oid: int) -> str | None:
        row = self.lookups.functions.get(oid)
        # A procedure returns nothing.
        if row is None or row["prokind"] == "p":
            return None
        return self.lookups.result_text(oid)

    def _describe_relation(self, oid: int) -> str:
        return self.lookups.shown_name(self.lookups.relations, oid) or str(oid)

    # -- sizes and rights ----------------------------------------------------------------------

    def _relation_size(self, relation: Any, _fork: str = "main") -> int | None:
        # Sizes of relations are not tracked.
        return 0 if self._relation_oid(relation) in self.lookups.relations else None

    def _updatable(self, relation: int, _triggers: int) -> int:
        found = self.lookups.relations.get(relation)
        return _TABLE_UPDATES if found is not None and found.kind == "r" else 0

    def _column_updatable(self, relation: int, number: int, triggers: int) -> int:
        return int(number > 0 and self._updatable(relation, triggers) != 0)

    def _has_privilege(self, *arguments: Any) -> int | None:
        # The arguments are an optional user, the object, a column if any, and the privilege.
        if len(arguments) >= 2:
            place = arguments[-2]
            if isinstance(place, str) and "." in place:
                split_name(place)
        return 1

    def _has_relation_privilege(self, *arguments: Any) -> int | None:
        relation = arguments[-2]
        # As in PostgreSQL, an unknown name is an error, but an unknown OID gives NULL.
        if isinstance(relation, str):
            self._read_registered(pg.REGCLASS, relation)
        elif relation not in self.lookups.relations:
            return None
        return 1

    # -- the table -----------------------------------------------------------------------------

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Map PostgreSQL's names to the functions."""
        return {
            **self._session_functions(),
            **self._definition_functions(),
            **self._privilege_functions(),
            "pg_relation_size": self._relation_size,
            "pg_table_size": self._relation_size,
            "pg_total_relation_size": self._relation_size,
            "pg_indexes_size": self._relation_size,
            "pg_relation_is_updatable": self._updatable,
            "pg_column_is_updatable": self._column_updatable,
        }

    def _session_functions(self) -> dict[str, Callable[..., Any]]:
        return {
            "version": self._version_text,
            "current_database": lambda: self.database,
            "current_catalog": lambda: self.database,
            "current_schema": self._current_schema,
            "current_schemas": self._current_schemas,
            "current_user": lambda: self.session.user,
            "current_role": lambda: self.session.user,
            "user": lambda: self.session.user,
            "session_user": lambda: self.session.session_user or self.session.user,
            "pg_backend_pid": lambda: self.session.process_id,
            "pg_cancel_backend": lambda pid: self._signal(pid, end=False),
            "pg_terminate_backend": self._terminate,
            "current_setting": self._current_setting,
            "set_config": self._set_config,
            "pg_client_encoding": lambda: "UTF8",
            "getdatabaseencoding": lambda: "UTF8",
            "inet_client_addr": lambda: self.session.client_address or None,
            "inet_client_port": lambda: self.session.client_port or None,
            "pg_postmaster_start_time": lambda: self.session.started,
            "pg_conf_load_time": lambda: self.session.started,
            "now": lambda: self.session.now,
            "current_timestamp": lambda: self.session.now,
            "localtimestamp": lambda: self.session.now,
            "transaction_timestamp": lambda: self.session.now,
            "statement_timestamp": lambda: self.session.now,
            "clock_timestamp": lambda: self.session.now,
            "current_date": lambda: self.session.now.partition(" ")[0],
        }

    def _definition_functions(self) -> dict[str, Callable[..., Any]]:
        return {
            "format_type": self._format_type,
            "pg_get_viewdef": self._view_definition,
            "pg_get_indexdef": self._index_definition,
            "pg_get_constraintdef": self._constraint_definition,
            "pg_get_ruledef": self._rule_definition,
            "pg_get_triggerdef": self._rule_definition,
            "pg_get_functiondef": self._rule_definition,
            "pg_get_partkeydef": self._rule_definition,
            "pg_get_partition_constraintdef": self._rule_definition,
            "pg_get_statisticsobjdef": self._rule_definition,
            "pg_get_statisticsobjdef_columns": self._rule_definition,
            # Expressions are stored as text already.
            "pg_get_expr": lambda expression, relation, pretty=0: expression,
            "pg_get_userbyid": self._role_name,
            "pg_get_serial_sequence": lambda relation, column: None,
            "pg_get_function_arguments": self._function_arguments,
            "pg_get_function_identity_arguments": self._function_arguments,
            "pg_get_function_result": self._function_result,
            "pg_get_function_sqlbody": self._rule_definition,
            "pg_get_function_arg_default": lambda function, number: None,
            "pg_table_is_visible": lambda oid: self.lookups.is_visible(self.lookups.relations, oid),
            "pg_type_is_visible": lambda oid: self.lookups.is_visible(self.lookups.types, oid),
            "pg_function_is_visible": self._function_visible,
            **{
                f"pg_{kind}_is_visible": lambda oid: 1
                for kind in [
                    "operator",
                    "opclass",
                    "opfamily",
                    "collation",
                    "conversion",
                    "statistics_obj",
                    "ts_config",
                    "ts_dict",
                    "ts_parser",
                    "ts_template",
                ]
            },
            "to_regclass": lambda text: self._find_registered(pg.REGCLASS, text),
            "to_regtype": lambda text: self._find_registered(pg.REGTYPE, text),
            "to_regproc": lambda text: self._find_registered(pg.REGPROC, text),
            "to_regprocedure": lambda text: self._find_registered(pg.REGPROCEDURE, text),
            "to_regnamespace": lambda text: self._find_registered(pg.REGNAMESPACE, text),
            "to_regrole": lambda text: self._find_registered(pg.REGROLE, text),
            "pg_get_keywords": lambda: array_json(self._keywords),
            "aclexplode": lambda items: explode_privileges(items, self.lookups.role_oid),
            "acldefault": lambda kind, owner: self._default_privileges(kind, owner),
        }

    def _default_privileges(self, kind: str, owner: int) -> str:
        return default_privileges(kind, quote_identifier(self._role_name(owner)))

    def _privilege_functions(self) -> dict[str, Callable[..., Any]]:
        kinds = (
            "any_column column database foreign_data_wrapper function language parameter schema"
            " server tablespace type"
        )
        return {
            **{f"has_{kind}_privilege": self._has_privilege for kind in kinds.split()},
            "has_table_privilege": self._has_relation_privilege,
            "has_sequence_privilege": self._has_relation_privilege,
            "pg_has_role": lambda *arguments: 1,
            "row_security_active": lambda relation: 0,
        }

    def operators(self) -> dict[str, Callable[..., Any]]:
        """Map names in SQLite to the functions that casts and views call."""
        return {
            "pg_read_registered": self._read_registered,
            "pg_sessions": self._session_rows,
            "pg_write_registered": self.lookups.registered_name,
            "pg_array_of_registered": self._array_of_registered,
            "pg_array_of_names": self._array_of_names,
            "pg_setting_now": lambda name, value: self.session.settings.get(name.lower(), value),
        }


_OWN_SETTINGS: Final = {
    # Where this service differs from an unconfigured PostgreSQL.
    "server_encoding": "UTF8",
    "client_encoding": "UTF8",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "datestyle": "ISO, MDY",
    "search_path": DEFAULT_SEARCH_PATH,
    "is_superuser": "on",
    "lc_collate": "C.UTF-8",
    "lc_ctype": "C.UTF-8",
    "lc_messages": "C.UTF-8",
    "lc_monetary": "C.UTF-8",
    "lc_numeric": "C.UTF-8",
    "lc_time": "C.UTF-8",
    "application_name": "",
}
"""The service's settings by lower-case name. A session's own settings override them."""

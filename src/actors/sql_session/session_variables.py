"""Settings of an SQL session: those that PostgreSQL's clients read and set, and our own.

A variable that is unknown is kept as it was set: drivers set such of their own
(``extra_float_digits``), and expect to read them back.
"""

from __future__ import annotations

from typing import Final

from actors.access.open_sessions import OpenSession
from actors.access.session_role import NONE, set_role, set_session_authorization
from actors.errors import InvalidUsage
from actors.pgwire.sqlstate import NOT_SUPPORTED
from actors.progress import Time

SERVER_VERSION: Final = "15.0 (Penstock)"
"""Version that clients see: drivers choose their catalog queries by its number."""
REPORTED: Final = (
    "server_version",
    "server_encoding",
    "client_encoding",
    "application_name",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "integer_datetimes",
    "standard_conforming_strings",
    "is_superuser",
    "session_authorization",
    "in_hot_standby",
    "default_transaction_read_only",
)
"""Variables whose values are told to the client at the start and whenever they change."""
_DEFAULTS: Final = {
    "server_version": SERVER_VERSION,
    "server_version_num": "150000",
    "server_encoding": "UTF8",
    "client_encoding": "UTF8",
    "application_name": "",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "integer_datetimes": "on",
    "standard_conforming_strings": "on",
    "is_superuser": "off",
    "in_hot_standby": "off",
    "default_transaction_read_only": "off",
    "search_path": '"$user", public',
    "transaction_isolation": "repeatable read",
    "default_transaction_isolation": "repeatable read",
    "transaction_read_only": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "password_encryption": "scram-sha-256",
    "max_identifier_length": "255",
    "row_security": "on",
    "xmloption": "content",
    "client_min_messages": "notice",
    "penstock.as_of": "",
    "penstock.refresh_policy": "auto",
    "penstock.written_at": "",
}
_WRITTEN_AT: Final = "penstock.written_at"
_FIXED: Final = frozenset(
    {
        "server_version",
        "server_version_num",
        "server_encoding",
        "integer_datetimes",
        "is_superuser",
        _WRITTEN_AT,
    }
)
_ONE_VALUE: Final = {
    "password_encryption": ("scram-sha-256",),
    "client_encoding": ("utf8", "utf-8", "unicode"),
    "standard_conforming_strings": ("on", "true", "1", "yes"),
    "intervalstyle": ("postgres", "default"),
    "datestyle": ("iso", "iso, mdy", "iso, dmy", "iso, ymd", "iso,mdy", "default"),
}
"""Variables that this service has in one form only, and the spellings of it."""
VARIABLES_MAX: Final = 256
"""Number of variables that one session may have."""


ROLE: Final = "role"
AUTHORIZATION: Final = "session_authorization"
ROLE_VARIABLES: Final = frozenset({ROLE, AUTHORIZATION})
"""Variables that are the session's roles, and no values of their own."""


class UnsupportedSetting(InvalidUsage):
    """A setting that cannot be obeyed, and so is not taken."""

    sqlstate = NOT_SUPPORTED


class SessionVariables:
    """Variables of one session, by name in any case."""

    def __init__(self, user: str, session: OpenSession | None = None) -> None:
        """Begin with the defaults. `session` has the roles of `user`; None: it cannot become
        another role."""
        self._user = user
        self._session = session
        self._names = {name.lower(): name for name in _DEFAULTS}
        self._values = {name.lower(): value for name, value in _DEFAULTS.items()}
        for name in ROLE_VARIABLES:
            self._names[name] = name
            self._values[name] = ""

    @property
    def current_user(self) -> str:
        """Return the role that the session acts as, or the name that its user gave."""
        return (self._session.role if self._session else None) or self._user

    @property
    def session_user(self) -> str:
        """Return the session's own role, or the name that its user gave."""
        return (self._session.session_role if self._session else None) or self._user

    def get(self, name: str) -> str:
        """Return a variable's value. Raises `InvalidUsage` for one that was never set."""
        value = self._value_of(name.lower())
        if value is None:
            raise InvalidUsage(f'unrecognized configuration parameter "{name}"')
        return value

    def all(self) -> list[tuple[str, str]]:
        """Return all variables and their values, by name."""
        return sorted((self._names[key], self._value_of(key) or "") for key in self._values)

    def _value_of(self, key: str) -> str | None:
        if key == AUTHORIZATION:
            return self.session_user
        if key == ROLE:
            session = self._session
            own = session is None or session.role == session.session_role
            return NONE if own else self.current_user
        return self._values.get(key)

    def set(self, name: str, value: str) -> str | None:
        """Set a variable, and return its reported name if the client must be told of the change.

        Raises:
            InvalidUsage: The variable cannot be changed, or not to this value; or the session has
                too many.
        """
        key = name.lower()
        # They say what the service is, and a client that changed them would believe itself.
        if key in _FIXED:
            raise InvalidUsage(f'parameter "{name}" cannot be changed')
        if key in ROLE_VARIABLES:
            return self._set_role(key, value)
        # Drivers set these to be sure; only the one form that there is can be granted.
        allowed = _ONE_VALUE.get(key)
        if allowed is not None:
            if value.strip().lower() not in allowed:
                raise InvalidUsage(
                    f'invalid value for parameter "{name}": "{value}"; this service has '
                    f"{_DEFAULTS[self._names[key]]} only"
                )
            return None
        if key not in self._values and len(self._values) >= VARIABLES_MAX:
            raise InvalidUsage(f"a session has at most {VARIABLES_MAX} parameters")
        self._names.setdefault(key, name)
        changed = self._values.get(key) != value
        self._values[key] = value
        return self._names[key] if changed and self._names[key] in REPORTED else None

    def reset(self, name: str) -> str | None:
        """Set a variable to its default; as `set`."""
        key = name.lower()
        if key in ROLE_VARIABLES:
            return self._set_role(key, None)
        # What the service says is not the session's to change.
        if key in _FIXED:
            return None
        default = _DEFAULTS.get(self._names.get(key, name))
        if default is None:
            self._values.pop(key, None)
            return None
        if self._values[key] == default:
            return None
        return self.set(name, default)

    def _set_role(self, key: str, value: str | None) -> str | None:
        """Change a role of the session; None: to its own. Return the variable's reported name if
        the client must be told. Raises as `session_role.set_role` does."""
        session, before = self._session, self.session_user
        if session is None:
            # DISCARD ALL and drivers reset what was never set.
            if value is None:
                return None
            raise UnsupportedSetting(
                f'parameter "{key}" is not supported here: PostgreSQL\'s clients alone may set it'
            )
        if key == AUTHORIZATION:
            set_session_authorization(session, value)
        else:
            set_role(session, NONE if value is None else value)
        return AUTHORIZATION if self.session_user != before else None

    def note_write(self, time: Time) -> None:
        """Keep the time of the session's last write, at which it can be read: ``SHOW
        penstock.written_at``."""
        self._values[_WRITTEN_AT] = str(time)

    def reported(self) -> list[tuple[str, str]]:
        """Return the variables that a client is told at the start."""
        return [(name, self._value_of(name.lower()) or "") for name in REPORTED]

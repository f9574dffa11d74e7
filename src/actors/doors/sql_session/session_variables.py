"""The values of one session's settings, and how transactions restore them.

As in PostgreSQL, a rollback undoes what the transaction set, and the end of a transaction undoes
what it set with SET LOCAL. RESET restores the values that the client requested when it connected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from actors.control.access.open_sessions import OpenSession
from actors.control.access.session_role import (
    NONE,
    RoleChoice,
    restore_role,
    role_choice,
    set_role,
    set_session_authorization,
)
from actors.doors.sql_session.session_settings import (
    AUTHORIZATION,
    BY_NAME,
    ROLE,
    ROLE_VARIABLES,
    SETTINGS,
    WRITTEN_AT,
    UnsupportedSetting,
    duration_ms,
    fixed_setting,
    parse_setting,
    setting_named,
    unknown_setting,
)
from actors.runtime.errors import InvalidUsage
from actors.runtime.progress import Time

VARIABLES_MAX: Final = 256
"""Maximum number of settings that one session may have, including its own."""
_VALUE_CHARACTERS_MAX: Final = 65_536
_REPORTED: Final = tuple(each.name for each in SETTINGS if each.reported)


class SettingsState(NamedTuple):
    """The settings and roles of a session at one moment, for `SessionVariables.restore`."""

    values: Mapping[str, str]
    kept_values: Mapping[str, str]
    roles: RoleChoice | None
    kept_roles: RoleChoice | None


class SessionVariables:
    """The settings of one session. Names are case-insensitive."""

    def __init__(self, user: str, session: OpenSession | None = None) -> None:
        """Start with the defaults. `session` holds the roles; None: they cannot change."""
        self._user = user
        self._session = session
        # The mappings are replaced and never mutated, so a `SettingsState` can share them.
        self._values: Mapping[str, str] = {each.name.lower(): each.default for each in SETTINGS}
        """The current values by lower-case name."""
        self._kept: Mapping[str, str] = self._values
        """The values that remain after COMMIT: those without SET LOCAL."""
        self._start: Mapping[str, str] = self._values
        """The values that RESET restores; set by `mark_start`."""
        self._kept_roles = self._roles()
        """The roles that remain after COMMIT; None without `session`."""

    @property
    def current_user(self) -> str:
        """Return the role that the session acts as, or the name that its user gave."""
        return (self._session.role if self._session else None) or self._user

    @property
    def session_user(self) -> str:
        """Return the session's own role, or the name that its user gave."""
        return (self._session.session_role if self._session else None) or self._user

    # -- values ------------------------------------------------------------------------------------

    def get(self, name: str) -> str:
        """Return a setting's value. Raises `UnknownSetting` for one that was never set."""
        value = self._value_of(name.lower())
        if value is None:
            raise unknown_setting(name)
        return value

    def milliseconds(self, name: str) -> int:
        """Return the value of a setting that is a duration."""
        return duration_ms(self._values[name])

    def all(self) -> list[tuple[str, str]]:
        """Return all settings and their values, by name."""
        return sorted(
            (BY_NAME[key].name if key in BY_NAME else key, self._value_of(key) or "")
            for key in self._values
        )

    def reported(self) -> dict[str, str]:
        """Return the settings that clients get at the start and after each change."""
        return {name: self._value_of(name.lower()) or "" for name in _REPORTED}

    def _value_of(self, key: str) -> str | None:
        if key == AUTHORIZATION:
            return self.session_user
        if key == ROLE:
            session = self._session
            own = session is None or session.role == session.session_role
            return NONE if own else self.current_user
        setting = BY_NAME.get(key)
        default = setting.of_transaction if setting else ""
        return (
            (self._values.get(key) or self._values[default]) if default else self._values.get(key)
        )

    def set(self, name: str, value: str, *, local: bool = False) -> None:
        """Set a setting; with `local`, only until the open transaction ends.

        Raises:
            InvalidUsage: The setting does not exist, is read-only, or does not accept the value; or
                the session has too many settings.
        """
        setting, key = setting_named(name), name.lower()
        if key in ROLE_VARIABLES:
            self._set_role(key, value, local=local)
            return
        if setting is not None:
            value = parse_setting(setting, value, self._values[key])
        if key not in self._values and len(self._values) >= VARIABLES_MAX:
            raise InvalidUsage(f"too many parameters in this session (limit {VARIABLES_MAX})")
        if len(value) > _VALUE_CHARACTERS_MAX:
            raise InvalidUsage(
                f'value for parameter "{name}" is too long (limit {_VALUE_CHARACTERS_MAX} '
                f"characters)"
            )
        self._put({key: value}, local=local)

    def reset(self, name: str, *, local: bool = False) -> None:
        """Reset a setting to its value at the start of the session. Raises as `set` does."""
        setting, key = setting_named(name), name.lower()
        if key in ROLE_VARIABLES:
            self._set_role(key, None, local=local)
        elif setting is not None and setting.parse is None:
            raise fixed_setting(setting)
        elif key in self._values:
            self._put({key: self._start.get(key, "")}, local=local)

    def reset_all(self) -> None:
        """Reset all settings except the roles and those of the open transaction."""
        for key in self._values:
            setting = BY_NAME.get(key)
            own = setting is None or not (setting.of_transaction or setting.parse is None)
            if own and key not in ROLE_VARIABLES:
                self.reset(key)

    def mark_start(self) -> None:
        """Make the current values those that RESET restores."""
        self._start = self._values

    def note_write(self, time: Time) -> None:
        """Set ``penstock.written_at`` to the timestamp of the session's last write."""
        self._put({WRITTEN_AT: str(time)}, local=False)

    def _put(self, change: dict[str, str], *, local: bool) -> None:
        self._values = {**self._values, **change}
        if not local:
            self._kept = {**self._kept, **change}

    def _set_role(self, key: str, value: str | None, *, local: bool) -> None:
        """Change a role of the session; None resets it. Raises as `session_role.set_role` does."""
        session = self._session
        if session is None:
            # DISCARD ALL and drivers reset roles that were never set.
            if value is None:
                return
            raise UnsupportedSetting(
                f'parameter "{key}" is supported only over PostgreSQL\'s protocol'
            )
        if key == AUTHORIZATION:
            set_session_authorization(session, value)
        else:
            set_role(session, NONE if value is None else value)
        if not local:
            self._kept_roles = self._roles()

    # -- transactions ------------------------------------------------------------------------------

    def state(self) -> SettingsState:
        """Return the current state, for `restore`."""
        return SettingsState(self._values, self._kept, self._roles(), self._kept_roles)

    def restore(self, state: SettingsState) -> None:
        """Restore an earlier state."""
        # As in PostgreSQL, names that were set since then stay known, with an empty value.
        empty = dict.fromkeys(self._values, "")
        self._values = {**empty, **state.values}
        self._kept = {**empty, **state.kept_values}
        self._restore_roles(state.roles)
        self._kept_roles = state.kept_roles

    def keep(self) -> None:
        """Undo SET LOCAL after a commit."""
        self.restore(SettingsState(self._kept, self._kept, self._kept_roles, self._kept_roles))

    def _roles(self) -> RoleChoice | None:
        return None if self._session is None else role_choice(self._session)

    def _restore_roles(self, roles: RoleChoice | None) -> None:
        if self._session is not None and roles is not None:
            restore_role(self._session, roles)

"""The settings of an SQL session: their names, values and effects.

A setting either takes effect or is refused: no value is accepted and then ignored. Some settings of
PostgreSQL concern features that this service lacks, such as locks, row security or a choice of
encodings. These accept the values that ask for what holds anyway. As in PostgreSQL, names with a
dot belong to the session's programs, which keep values there for `current_setting`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from actors.model.pgwire.session_zones import parse_session_zone
from actors.model.pgwire.sqlstate import NOT_SUPPORTED
from actors.model.pgwire.value_parsing import FALSE_WORDS, TRUE_WORDS
from actors.runtime.errors import InvalidUsage, nearest_hint

SERVER_VERSION: Final = "15.0 (Penstock)"
"""The version that clients see. Drivers choose their catalog queries by it."""
ROLE: Final = "role"
AUTHORIZATION: Final = "session_authorization"
ROLE_VARIABLES: Final = frozenset({ROLE, AUTHORIZATION})
"""Settings that show and change the session's roles instead of holding a value."""
ISOLATION: Final = "transaction_isolation"
READ_ONLY: Final = "transaction_read_only"
WRITTEN_AT: Final = "penstock.written_at"
REPEATABLE_READ: Final = "repeatable read"
READ_COMMITTED: Final = "read committed"
ParseSetting = Callable[[str, str], str]
"""Parses a text and the current value into the value that SHOW shows. Raises `InvalidUsage`."""
_NAME: Final = re.compile(r"[^\W\d][\w$]*(?:\.[^\W\d][\w$]*)+")
_INTEGER_MAX: Final = 2**31 - 1


class UnknownSetting(InvalidUsage):
    """No setting has this name."""

    sqlstate = "42704"


class UnsupportedSetting(InvalidUsage):
    """A setting, or a value of it, that this service does not support."""

    sqlstate = NOT_SUPPORTED


class _FixedSetting(InvalidUsage):
    """The setting is read-only: it describes the service."""

    sqlstate = "55P02"


class _InvalidName(InvalidUsage):
    """The name is not a valid setting name."""

    sqlstate = "42602"


class SessionSetting(msgspec.Struct, frozen=True):
    """A setting that every session has."""

    name: str
    default: str
    values: str
    """The accepted values, for the documentation."""
    effect: str
    """The effect, for the documentation."""
    parse: ParseSetting | None
    """Parses a new value; None: the setting is read-only."""
    reported: bool = False
    """True if clients get its value at the start and whenever it changes (ParameterStatus)."""
    quoted: bool = False
    """True for a list of identifiers: SET takes one identifier per value."""
    of_transaction: str = ""
    """For a setting of the transaction, the setting with its default; "" for all others."""


# -- values ----------------------------------------------------------------------------------------


def _invalid(name: str, text: str, why: str) -> InvalidUsage:
    return InvalidUsage(f'invalid value for parameter "{name}": "{text[:64]}"; {why}')


def _boolean(name: str) -> ParseSetting:
    def parse(text: str, _: str) -> str:
        if (word := text.lower()) in TRUE_WORDS:
            return "on"
        if word in FALSE_WORDS:
            return "off"
        raise _invalid(name, text, "expected on or off")

    return parse


def _choice(name: str, values: Sequence[str], **synonyms: str) -> ParseSetting:
    """Return a parser that accepts only these values; `synonyms` maps other spellings to them."""
    spelled = {value.lower(): value for value in values} | synonyms
    listed = " or ".join(filter(None, [", ".join(values[:-1]), values[-1] or "''"]))

    def parse(text: str, _: str) -> str:
        found = spelled.get(text.lower())
        if found is None:
            raise _invalid(name, text, f"this service supports only {listed}")
        return found

    return parse


def _isolation(name: str) -> ParseSetting:
    known = _choice(name, (REPEATABLE_READ, READ_COMMITTED, "read uncommitted"))

    def parse(text: str, present: str) -> str:
        if text.lower() == "serializable":
            raise UnsupportedSetting(
                f'"{name}" cannot be serializable: transactions use snapshot isolation, which is '
                "repeatable read"
            )
        return known(text, present)

    return parse


_UNITS_MS: Final = {
    "us": 0.001,
    "ms": 1,
    "s": 1_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_DURATION: Final = re.compile(
    r"\s*(?P<number>-?(?!0[0-9])(?:[0-9]+\.?[0-9]*|\.[0-9]+))\s*(?P<unit>us|ms|s|min|h|d)?\s*"
)
"""Matches a duration. PostgreSQL reads a number with a leading 0 as octal; it is refused here."""


def duration_ms(shown: str) -> int:
    """Convert a duration to milliseconds, rounded as PostgreSQL does.

    >>> duration_ms("1.5s"), duration_ms("20")
    (1500, 20)
    """
    found = _DURATION.fullmatch(shown)
    assert found is not None, shown
    return round(float(found["number"]) * _UNITS_MS[found["unit"] or "ms"])


def _duration(name: str) -> ParseSetting:
    def parse(text: str, _: str) -> str:
        if _DURATION.fullmatch(text) is None or len(text) > 64:
            raise _invalid(name, text, 'expected milliseconds, or a number with a unit like "30s"')
        time_ms = duration_ms(text)
        if not 0 <= time_ms <= _INTEGER_MAX:
            raise _invalid(name, text, f"expected 0 to {_INTEGER_MAX} ms")
        # PostgreSQL shows the largest unit that gives an integer.
        for unit in ("d", "h", "min", "s") if time_ms else ():
            if time_ms % int(_UNITS_MS[unit]) == 0:
                return f"{time_ms // int(_UNITS_MS[unit])}{unit}"
        return f"{time_ms}ms" if time_ms else "0"

    return parse


def _float_digits(text: str, _: str) -> str:
    # 1, 2 and 3 all mean the shortest text that reads back as the same number.
    if re.fullmatch(r"\s*[1-3]\s*", text) is None:
        raise _invalid(
            "extra_float_digits", text, "expected 1, 2 or 3, since floats are written exactly"
        )
    return text.strip()


_DATE_ORDERS: Final = {"mdy": "MDY", "us": "MDY", "dmy": "DMY", "ymd": "YMD"}


def _date_style(text: str, present: str) -> str:
    order, orders = present.rpartition(" ")[2], set()
    for word in (each.strip().lower() for each in text.split(",")):
        if word in _DATE_ORDERS:
            orders.add(order := _DATE_ORDERS[word])
        elif word == "default":
            order = "MDY"
        elif word != "iso":
            raise _invalid("DateStyle", text, "this service supports only ISO")
    if len(orders) > 1:
        raise _invalid("DateStyle", text, "it names two conflicting orders")
    return f"ISO, {order}"


def _encoding(text: str, _: str) -> str:
    # Like PostgreSQL, ignore everything but letters and digits.
    if re.sub(r"[^a-z0-9]", "", text.lower()) not in ("utf8", "unicode"):
        raise _invalid("client_encoding", text, "this service supports only UTF8")
    return "UTF8"


_SCHEMAS: Final = frozenset(
    {"", "$user", "public", "default", "pg_catalog", "information_schema", "penstock", "pg_temp"}
)
_PATH: Final = re.compile(r'\s*(?:"((?:[^"]|"")*)"|([^\s",]+))\s*(,|$)')


def _search_path(text: str, _: str) -> str:
    at = 0
    while text.strip() and at <= len(text):
        found = _PATH.match(text, at)
        if found is None:
            raise _invalid("search_path", text, "expected a list of schema names")
        quoted, bare, more = found.groups()
        name = bare.lower() if quoted is None else quoted.replace('""', '"')
        # The order does not matter: public is the only schema with users' objects, so unqualified
        # names are found there in any case.
        if name not in _SCHEMAS:
            raise _invalid("search_path", text, f"schema {name} does not exist (available: public)")
        if not more:
            break
        at = found.end()
    return text


def _as_of(text: str, _: str) -> str:
    if text and not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise _invalid(
            "penstock.as_of", text, "expected milliseconds since the epoch, or '' for the latest"
        )
    return text


def _time_zone(text: str, _: str) -> str:
    return parse_session_zone(text).shown


def _any_text(text: str, _: str) -> str:
    # The value is checked where it is used: only the service knows its roles.
    return text


# -- the settings ----------------------------------------------------------------------------------


def _shown(name: str, value: str, effect: str, *, reported: bool = False) -> SessionSetting:
    return SessionSetting(name, value, "read-only", effect, None, reported)


def _harmless(name: str, value: str, why: str) -> SessionSetting:
    return SessionSetting(name, value, "`on`, `off`", f"nothing: {why}", _boolean(name))


def _only(
    name: str, values: Sequence[str], effect: str, *, reported: bool = False, **synonyms: str
) -> SessionSetting:
    shown = ", ".join(f"`{value}`" if value else "`''`" for value in values)
    return SessionSetting(
        name, values[0], shown, effect, _choice(name, values, **synonyms), reported
    )


_DEBUG_LEVELS: Final = ("debug5", "debug4", "debug3", "debug2", "debug1")
MESSAGE_LEVELS: Final = (*_DEBUG_LEVELS, "log", "info", "notice", "warning", "error")
"""Values of `client_min_messages`, the least severe first."""
_DURATIONS: Final = 'milliseconds, or a number with a unit: `"30s"`; `0`: no limit'
_BOOLEAN: Final = "`on`, `off`"
_ISOLATIONS: Final = "`repeatable read`, `read committed`; `serializable` is refused"

SETTINGS: Final = (
    SessionSetting(
        "application_name",
        "",
        "any text",
        "name of the session in `pg_stat_activity`",
        _any_text,
        reported=True,
    ),
    SessionSetting(
        "client_encoding", "UTF8", "`UTF8`", "text is always UTF-8", _encoding, reported=True
    ),
    SessionSetting(
        "client_min_messages",
        "notice",
        "`debug5` … `error`",
        "notices and warnings below this level are not sent",
        _choice("client_min_messages", MESSAGE_LEVELS, debug="debug2"),
    ),
    SessionSetting(
        "DateStyle",
        "ISO, MDY",
        "`ISO`, with any order",
        "dates are read and written in ISO format, for which the order does not matter",
        _date_style,
        reported=True,
    ),
    _only(
        "IntervalStyle", ("postgres",), "intervals are always written in this style", reported=True
    ),
    SessionSetting(
        "TimeZone",
        "UTC",
        "a name like `Europe/Rome`, hours east of UTC, or an offset with POSIX's sign",
        "zone in which times are read and written, and in which dates, hours and casts of times to "
        "text are computed",
        _time_zone,
        reported=True,
    ),
    SessionSetting(
        "extra_float_digits",
        "1",
        "`1`, `2`, `3`",
        "floats are written with as many digits as they need to read back unchanged",
        _float_digits,
    ),
    _only("bytea_output", ("hex",), "bytes are always written in hexadecimal"),
    _only(
        "standard_conforming_strings",
        ("on",),
        "a backslash in `'…'` is an ordinary character",
        reported=True,
        **dict.fromkeys(TRUE_WORDS, "on"),
    ),
    SessionSetting(
        "search_path",
        '"$user", public',
        "names of existing schemas",
        "what `current_schemas()` returns; unqualified names are always found in `public`",
        _search_path,
        quoted=True,
    ),
    SessionSetting(
        "default_transaction_read_only",
        "off",
        _BOOLEAN,
        "makes single statements and later transactions read-only: any change is refused (25006)",
        _boolean("default_transaction_read_only"),
        reported=True,
    ),
    SessionSetting(
        READ_ONLY,
        "",
        _BOOLEAN,
        "makes the open transaction read-only",
        _boolean(READ_ONLY),
        of_transaction="default_transaction_read_only",
    ),
    SessionSetting(
        "default_transaction_isolation",
        REPEATABLE_READ,
        _ISOLATIONS,
        "isolation level of later transactions",
        _isolation("default_transaction_isolation"),
    ),
    SessionSetting(
        ISOLATION,
        "",
        _ISOLATIONS,
        "whether the open transaction reads at one timestamp, or each of its statements at the "
        "latest",
        _isolation(ISOLATION),
        of_transaction="default_transaction_isolation",
    ),
    SessionSetting(
        "statement_timeout",
        "0",
        _DURATIONS,
        "cancels a statement that takes longer (57014), unless it is already committing",
        _duration("statement_timeout"),
    ),
    SessionSetting(
        "idle_in_transaction_session_timeout",
        "0",
        _DURATIONS,
        "ends a session that is idle within a transaction for longer (25P03)",
        _duration("idle_in_transaction_session_timeout"),
    ),
    SessionSetting(
        "idle_session_timeout",
        "0",
        _DURATIONS,
        "ends a session that is idle outside a transaction for longer (57P05)",
        _duration("idle_session_timeout"),
    ),
    SessionSetting(
        "lock_timeout",
        "0",
        _DURATIONS,
        "nothing: no statement waits for a lock",
        _duration("lock_timeout"),
    ),
    _harmless("default_transaction_deferrable", "off", "transactions never wait to start"),
    _harmless("row_security", "on", "no table has policies"),
    _harmless("check_function_bodies", "on", "CREATE FUNCTION is not supported"),
    _harmless("jit", "on", "it does not affect results"),
    _only(
        "synchronous_commit",
        ("on", "off", "local", "remote_write", "remote_apply"),
        "nothing: every write is durable before it is acknowledged",
    ),
    _only("xmloption", ("content", "document"), "nothing: there is no type xml"),
    _only("default_tablespace", ("",), "there are no tablespaces"),
    _only("default_table_access_method", ("heap",), "there is only one kind of table"),
    _only("password_encryption", ("scram-sha-256",), "passwords are stored as SCRAM verifiers"),
    SessionSetting(
        ROLE,
        "",
        "a role, `none`",
        "the role whose rights the session has",
        _any_text,
    ),
    SessionSetting(AUTHORIZATION, "", "a role", "the session's own role", _any_text, reported=True),
    SessionSetting(
        "penstock.as_of",
        "",
        "milliseconds, `''`",
        "timestamp of reads without `AS OF`",
        _as_of,
    ),
    _only(
        "penstock.refresh_policy",
        ("auto", "incremental", "incremental strict", "full"),
        "refresh policy of views that are created without one",
    ),
    _shown(WRITTEN_AT, "", "timestamp of the session's last write; reads at it see the write"),
    _shown("server_version", SERVER_VERSION, "version of PostgreSQL's protocol", reported=True),
    _shown("server_version_num", "150000", "the version as a number"),
    _shown("server_encoding", "UTF8", "encoding of stored text", reported=True),
    _shown("integer_datetimes", "on", "times are integers of microseconds", reported=True),
    _shown("in_hot_standby", "off", "the service accepts writes", reported=True),
    _shown("is_superuser", "off", "always `off`; for rights see `SHOW GRANTS`", reported=True),
    _shown("max_identifier_length", "255", "maximum length of a name in bytes"),
)
BY_NAME: Final = {each.name.lower(): each for each in SETTINGS}
"""The settings by lower-case name."""


def setting_named(name: str) -> SessionSetting | None:
    """Return the setting with this name; None for a session's own name, which contains a dot.

    Raises:
        UnknownSetting: No setting has this name.
        UnsupportedSetting: It is a setting of Spark.
    """
    found = BY_NAME.get(name.lower())
    if found is not None:
        return found
    if name.lower().startswith("spark."):
        raise UnsupportedSetting(
            f'parameter "{name}" is a Spark setting, which SQL sessions do not support: set it for '
            "a view with TBLPROPERTIES, or in a Spark Connect session"
        )
    if "." not in name or name.lower().startswith("penstock."):
        raise unknown_setting(name)
    if _NAME.fullmatch(name) is None:
        raise _InvalidName(f'invalid configuration parameter name "{name[:64]}"')
    return None


def unknown_setting(name: str) -> UnknownSetting:
    """Return the error for an unknown setting, with the nearest known name."""
    hint = nearest_hint(name, [each.name for each in SETTINGS])
    return UnknownSetting(f'unrecognized configuration parameter "{name[:64]}"{hint}')


def fixed_setting(setting: SessionSetting) -> InvalidUsage:
    """Return the error for an attempt to change a read-only setting."""
    return _FixedSetting(f'parameter "{setting.name}" cannot be changed')


def parse_setting(setting: SessionSetting, text: str, present: str) -> str:
    """Parse a new value of a setting, whose current value is `present`. Raises `InvalidUsage`."""
    if setting.parse is None:
        raise fixed_setting(setting)
    return setting.parse(text, present)


def settings_table() -> str:
    """Return the settings as a Markdown table for the documentation."""
    lines = ["| setting | values | what it does |", "|---|---|---|"]
    for each in sorted(SETTINGS, key=lambda each: each.name.lower()):
        default = f" ({each.default})" if each.default and each.parse is not None else ""
        lines.append(f"| `{each.name}`{default} | {each.values} | {each.effect} |")
    return "\n".join(lines) + "\n"

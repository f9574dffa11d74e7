"""The settings of an SQL session: which there are, what values they take, and what each one does.

A setting is obeyed, or it is refused by name: nothing is kept and shown that has no effect. Where
PostgreSQL's setting is about something that this service lacks (locks, row security, a choice of
encodings), the values are taken that ask for what holds anyway. Names with a point are a session's
own, as in PostgreSQL: programs keep values in them for `current_setting`. Pure.
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
"""Version that clients see: drivers choose their catalog queries by its number."""
ROLE: Final = "role"
AUTHORIZATION: Final = "session_authorization"
ROLE_VARIABLES: Final = frozenset({ROLE, AUTHORIZATION})
"""Settings that are the session's roles, and no values of their own."""
ISOLATION: Final = "transaction_isolation"
READ_ONLY: Final = "transaction_read_only"
WRITTEN_AT: Final = "penstock.written_at"
REPEATABLE_READ: Final = "repeatable read"
READ_COMMITTED: Final = "read committed"
ParseSetting = Callable[[str, str], str]
"""Returns a text as the value that SHOW shows, given the present value. Raises `InvalidUsage`."""
_NAME: Final = re.compile(r"[^\W\d][\w$]*(?:\.[^\W\d][\w$]*)+")
_INTEGER_MAX: Final = 2**31 - 1


class UnknownSetting(InvalidUsage):
    """There is no setting of this name."""

    sqlstate = "42704"


class UnsupportedSetting(InvalidUsage):
    """A setting that cannot be obeyed, and so is not taken."""

    sqlstate = NOT_SUPPORTED


class _FixedSetting(InvalidUsage):
    """A setting that says what the service is, which no session changes."""

    sqlstate = "55P02"


class _InvalidName(InvalidUsage):
    """A name that no setting can have."""

    sqlstate = "42602"


class SessionSetting(msgspec.Struct, frozen=True):
    """A setting that every session has."""

    name: str
    default: str
    values: str
    """The values that it takes, for the documentation."""
    effect: str
    """Its effect, for the documentation."""
    parse: ParseSetting | None
    """None: it is shown, and not to be set."""
    reported: bool = False
    """True if clients are told its value at the start and whenever it changes."""
    quoted: bool = False
    """True if it is a list of identifiers: each value of SET is one of them."""
    of_transaction: str = ""
    """The setting that has its value outside of a transaction; "": it is a session's own."""


# -- values ----------------------------------------------------------------------------------------


def _invalid(name: str, text: str, why: str) -> InvalidUsage:
    return InvalidUsage(f'invalid value for parameter "{name}": "{text[:64]}"; {why}')


def _boolean(name: str) -> ParseSetting:
    def parse(text: str, _: str) -> str:
        if (word := text.lower()) in TRUE_WORDS:
            return "on"
        if word in FALSE_WORDS:
            return "off"
        raise _invalid(name, text, "on or off")

    return parse


def _choice(name: str, values: Sequence[str], **synonyms: str) -> ParseSetting:
    """Return the parser of a setting with these values only; `synonyms` are spellings of them."""
    spelled = {value.lower(): value for value in values} | synonyms
    listed = " or ".join(filter(None, [", ".join(values[:-1]), values[-1] or "''"]))

    def parse(text: str, _: str) -> str:
        found = spelled.get(text.lower())
        if found is None:
            raise _invalid(name, text, f"this service has {listed} only")
        return found

    return parse


def _isolation(name: str) -> ParseSetting:
    known = _choice(name, (REPEATABLE_READ, READ_COMMITTED, "read uncommitted"))

    def parse(text: str, present: str) -> str:
        if text.lower() == "serializable":
            raise UnsupportedSetting(
                f'"{name}" cannot be serializable: transactions are isolated by snapshots, which '
                "is repeatable read"
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
"""Matches a duration. PostgreSQL reads a number that begins with 0 as octal; it is refused here."""


def duration_ms(shown: str) -> int:
    """Return the milliseconds of a duration, rounded as PostgreSQL does.

    >>> duration_ms("1.5s"), duration_ms("20")
    (1500, 20)
    """
    found = _DURATION.fullmatch(shown)
    assert found is not None, shown
    return round(float(found["number"]) * _UNITS_MS[found["unit"] or "ms"])


def _duration(name: str) -> ParseSetting:
    def parse(text: str, _: str) -> str:
        if _DURATION.fullmatch(text) is None or len(text) > 64:
            raise _invalid(name, text, 'milliseconds, or a number with a unit such as "30s"')
        time_ms = duration_ms(text)
        if not 0 <= time_ms <= _INTEGER_MAX:
            raise _invalid(name, text, f"at least 0 and at most {_INTEGER_MAX} ms")
        # As PostgreSQL shows it: the largest unit of which it is a whole number.
        for unit in ("d", "h", "min", "s") if time_ms else ():
            if time_ms % int(_UNITS_MS[unit]) == 0:
                return f"{time_ms // int(_UNITS_MS[unit])}{unit}"
        return f"{time_ms}ms" if time_ms else "0"

    return parse


def _float_digits(text: str, _: str) -> str:
    # All of these mean the shortest text that reads back as the same number.
    if re.fullmatch(r"\s*[1-3]\s*", text) is None:
        raise _invalid("extra_float_digits", text, "floats are written exactly: 1, 2 or 3")
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
            raise _invalid("DateStyle", text, "this service has ISO only")
    if len(orders) > 1:
        raise _invalid("DateStyle", text, "it names two orders")
    return f"ISO, {order}"


def _encoding(text: str, _: str) -> str:
    # PostgreSQL drops what is neither letter nor digit, too.
    if re.sub(r"[^a-z0-9]", "", text.lower()) not in ("utf8", "unicode"):
        raise _invalid("client_encoding", text, "this service has UTF8 only")
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
            raise _invalid("search_path", text, "it must be a list of names of schemas")
        quoted, bare, more = found.groups()
        name = bare.lower() if quoted is None else quoted.replace('""', '"')
        # Names without a schema are found in public wherever it stands: there is no other one in
        # which a user's objects could be.
        if name not in _SCHEMAS:
            raise _invalid("search_path", text, f"schema {name} does not exist: there is public")
        if not more:
            break
        at = found.end()
    return text


def _as_of(text: str, _: str) -> str:
    if text and not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise _invalid("penstock.as_of", text, "a time in milliseconds, or '' for the latest")
    return text


def _time_zone(text: str, _: str) -> str:
    return parse_session_zone(text).shown


def _any_text(text: str, _: str) -> str:
    # Whoever uses the value checks it: only the service knows its roles.
    return text


# -- the settings ----------------------------------------------------------------------------------


def _shown(name: str, value: str, effect: str, *, reported: bool = False) -> SessionSetting:
    return SessionSetting(name, value, "shown only", effect, None, reported)


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
"""Values of `client_min_messages`, the least first."""
_DURATIONS: Final = 'milliseconds, or with a unit: `"30s"`; `0`: none'
_BOOLEAN: Final = "`on`, `off`"
_ISOLATIONS: Final = "`repeatable read`, `read committed`; `serializable` is refused"

SETTINGS: Final = (
    SessionSetting(
        "application_name",
        "",
        "any text",
        "is the session's name in `pg_stat_activity`",
        _any_text,
        reported=True,
    ),
    SessionSetting(
        "client_encoding", "UTF8", "`UTF8`", "texts are UTF-8 alone", _encoding, reported=True
    ),
    SessionSetting(
        "client_min_messages",
        "notice",
        "`debug5` … `error`",
        "notices and warnings below it are not sent",
        _choice("client_min_messages", MESSAGE_LEVELS, debug="debug2"),
    ),
    SessionSetting(
        "DateStyle",
        "ISO, MDY",
        "`ISO`, with any order",
        "dates are written and read as ISO has them, in which the order says nothing",
        _date_style,
        reported=True,
    ),
    _only(
        "IntervalStyle", ("postgres",), "intervals are written in this style alone", reported=True
    ),
    SessionSetting(
        "TimeZone",
        "UTC",
        "a name like `Europe/Rome`; hours east of UTC; an offset with POSIX's sign",
        "times are read and written in it, and days, hours and texts of times are its own",
        _time_zone,
        reported=True,
    ),
    SessionSetting(
        "extra_float_digits",
        "1",
        "`1`, `2`, `3`",
        "floats are written with all digits that they need",
        _float_digits,
    ),
    _only("bytea_output", ("hex",), "bytes are written in hex alone"),
    _only(
        "standard_conforming_strings",
        ("on",),
        "a backslash in `'…'` is a backslash",
        reported=True,
        **dict.fromkeys(TRUE_WORDS, "on"),
    ),
    SessionSetting(
        "search_path",
        '"$user", public',
        "the schemas that there are",
        "`current_schemas()`; names without a schema are always found in `public`",
        _search_path,
        quoted=True,
    ),
    SessionSetting(
        "default_transaction_read_only",
        "off",
        _BOOLEAN,
        "statements and later transactions only read: whatever would change something is refused "
        "(25006)",
        _boolean("default_transaction_read_only"),
        reported=True,
    ),
    SessionSetting(
        READ_ONLY,
        "",
        _BOOLEAN,
        "the open transaction only reads",
        _boolean(READ_ONLY),
        of_transaction="default_transaction_read_only",
    ),
    SessionSetting(
        "default_transaction_isolation",
        REPEATABLE_READ,
        _ISOLATIONS,
        "isolation of later transactions",
        _isolation("default_transaction_isolation"),
    ),
    SessionSetting(
        ISOLATION,
        "",
        _ISOLATIONS,
        "the open transaction reads at one time, or each of its statements at the latest",
        _isolation(ISOLATION),
        of_transaction="default_transaction_isolation",
    ),
    SessionSetting(
        "statement_timeout",
        "0",
        _DURATIONS,
        "a statement that takes longer is canceled (57014), unless its rows are being committed",
        _duration("statement_timeout"),
    ),
    SessionSetting(
        "idle_in_transaction_session_timeout",
        "0",
        _DURATIONS,
        "ends a session that leaves its transaction open for longer (25P03)",
        _duration("idle_in_transaction_session_timeout"),
    ),
    SessionSetting(
        "idle_session_timeout",
        "0",
        _DURATIONS,
        "ends a session that does nothing for longer, outside of a transaction (57P05)",
        _duration("idle_session_timeout"),
    ),
    SessionSetting(
        "lock_timeout",
        "0",
        _DURATIONS,
        "nothing: no statement waits for a lock",
        _duration("lock_timeout"),
    ),
    _harmless("default_transaction_deferrable", "off", "transactions never wait to begin"),
    _harmless("row_security", "on", "no table has policies"),
    _harmless("check_function_bodies", "on", "there is no CREATE FUNCTION"),
    _harmless("jit", "on", "it changes no result"),
    _only(
        "synchronous_commit",
        ("on", "off", "local", "remote_write", "remote_apply"),
        "nothing: every write is durable before it is acknowledged",
    ),
    _only("xmloption", ("content", "document"), "nothing: there is no type xml"),
    _only("default_tablespace", ("",), "there are no tablespaces"),
    _only("default_table_access_method", ("heap",), "there is one kind of tables"),
    _only("password_encryption", ("scram-sha-256",), "passwords are kept as SCRAM verifiers alone"),
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
        "reads without `AS OF` are of this time",
        _as_of,
    ),
    _only(
        "penstock.refresh_policy",
        ("auto", "incremental", "incremental strict", "full"),
        "policy of views that are created without one",
    ),
    _shown(WRITTEN_AT, "", "time of the session's last write, at which it can be read"),
    _shown("server_version", SERVER_VERSION, "the version of PostgreSQL's protocol", reported=True),
    _shown("server_version_num", "150000", "the same as a number"),
    _shown("server_encoding", "UTF8", "how texts are stored", reported=True),
    _shown("integer_datetimes", "on", "times are whole microseconds", reported=True),
    _shown("in_hot_standby", "off", "the service can be written", reported=True),
    _shown("is_superuser", "off", "rights are not told by it: see `SHOW GRANTS`", reported=True),
    _shown("max_identifier_length", "255", "bytes of a name"),
)
BY_NAME: Final = {each.name.lower(): each for each in SETTINGS}
"""The settings by their names in lower case."""


def setting_named(name: str) -> SessionSetting | None:
    """Return the setting of a name; None for one of the session's own.

    Raises:
        UnknownSetting: No setting has this name.
        UnsupportedSetting: It is one of Spark's.
    """
    found = BY_NAME.get(name.lower())
    if found is not None:
        return found
    if name.lower().startswith("spark."):
        raise UnsupportedSetting(
            f'parameter "{name}" is a setting of Spark, which a session of SQL has none of: give '
            "it to a view by TBLPROPERTIES, or set it in a session of Spark Connect"
        )
    if "." not in name or name.lower().startswith("penstock."):
        raise unknown_setting(name)
    if _NAME.fullmatch(name) is None:
        raise _InvalidName(f'invalid configuration parameter name "{name[:64]}"')
    return None


def unknown_setting(name: str) -> UnknownSetting:
    """Return the error for a name that no setting has."""
    hint = nearest_hint(name, [each.name for each in SETTINGS])
    return UnknownSetting(f'unrecognized configuration parameter "{name[:64]}"{hint}')


def fixed_setting(setting: SessionSetting) -> InvalidUsage:
    """Return the error for a setting that no session changes."""
    return _FixedSetting(f'parameter "{setting.name}" cannot be changed')


def parse_setting(setting: SessionSetting, text: str, present: str) -> str:
    """Return a text as the value of a setting, which has the value `present`. Raises
    `InvalidUsage`."""
    if setting.parse is None:
        raise fixed_setting(setting)
    return setting.parse(text, present)


def settings_table() -> str:
    """Return the settings as a table of the documentation."""
    lines = ["| setting | values | what it does |", "|---|---|---|"]
    for each in sorted(SETTINGS, key=lambda each: each.name.lower()):
        default = f" ({each.default})" if each.default and each.parse is not None else ""
        lines.append(f"| `{each.name}`{default} | {each.values} | {each.effect} |")
    return "\n".join(lines) + "\n"

"""PostgreSQL's functions on text, arrays and JSON that catalog queries use. Pure.

Arguments and results are values as SQLite stores them: Booleans are 0 and 1, arrays are JSON text.
As in PostgreSQL, a function is not called with NULLs unless it is in `NULL_TAKERS`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final

from actors.doors.postgres.pg_catalog.catalog_errors import (
    NOT_SUPPORTED,
    PROGRAM_LIMIT,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.catalog_lookups import split_name
from actors.doors.postgres.pg_catalog.pg_types import ELEMENT_OF, format_catalog_value
from actors.doors.postgres.pg_catalog.typed_sql import array_json, read_text
from actors.model.pgwire.quoting import quote_identifier, quote_literal
from actors.model.pgwire.type_oids import BOOL

_CLASSES: Final = {
    "[:alpha:]": "a-zA-Z",
    "[:digit:]": "0-9",
    "[:alnum:]": "a-zA-Z0-9",
    "[:space:]": r"\s",
    "[:upper:]": "A-Z",
    "[:lower:]": "a-z",
    "[:punct:]": r"!-/:-@\[-`{-~",
    "[:xdigit:]": "0-9a-fA-F",
}
_ESCAPES: Final = {r"\m": r"\b(?=\w)", r"\M": r"\b(?<=\w)", r"\y": r"\b", r"\A": r"\A"}


@lru_cache(maxsize=256)
def compile_pattern(pattern: str, flags: str = "") -> re.Pattern[str]:
    """Translate a PostgreSQL regular expression to Python.

    The two differ only in the names of classes and the escapes for word boundaries. Raises
    `CatalogQueryError`.

    >>> bool(compile_pattern("^(orders|[[:digit:]]+)$").search("12"))
    True
    """
    for name, text in _CLASSES.items():
        pattern = pattern.replace(name, text)
    for escape, text in _ESCAPES.items():
        pattern = pattern.replace(escape, text)
    # The prefix ***= marks a literal string.
    if pattern.startswith("***="):
        pattern = re.escape(pattern[4:])
    # In PostgreSQL, a dot matches line breaks unless the flag n is given.
    options = re.DOTALL if "n" not in flags else re.MULTILINE
    if "i" in flags:
        options |= re.IGNORECASE
    try:
        return re.compile(pattern, options)
    except re.error as error:
        raise CatalogQueryError(f"invalid regular expression: {error}", "2201B") from None


def match_pattern(text: str, pattern: str, flags: str = "") -> int:
    """Return whether a pattern matches anywhere in a text: PostgreSQL's ``~``, or ``~*`` with the
    flag ``i``."""
    return int(compile_pattern(pattern, flags).search(str(text)) is not None)


def _python_template(replacement: str) -> str:
    r"""Translate ``\1`` and ``\&`` in a replacement to Python."""
    return replacement.replace(r"\&", r"\g<0>")


def replace_pattern(text: str, pattern: str, replacement: str, flags: str = "") -> str:
    """Replace the first match in a text, or all with the flag ``g``."""
    count = 0 if "g" in flags else 1
    compiled = compile_pattern(pattern, flags.replace("g", ""))
    return compiled.sub(_python_template(replacement), text, count=count)


def _groups(found: re.Match[str]) -> list[str | None]:
    return list(found.groups()) or [found[0]]


def match_groups(text: str, pattern: str, flags: str = "") -> str | None:
    """Return the groups of the first match as an array; NULL without a match."""
    found = compile_pattern(pattern, flags).search(text)
    return array_json(_groups(found)) if found else None


def find_all_groups(text: str, pattern: str, flags: str = "") -> str:
    """Return an array with the groups of the first match, or of all with the flag ``g``."""
    found = compile_pattern(pattern, flags.replace("g", "")).finditer(text)
    rows = [_groups(each) for each in found]
    return array_json(rows if "g" in flags else rows[:1])


def split_by_pattern(text: str, pattern: str, flags: str = "") -> str:
    """Return an array of the parts of a text between matches."""
    # Avoid re.split, which would insert the groups between the parts.
    compiled = compile_pattern(pattern, flags)
    parts, start = [], 0
    for found in compiled.finditer(text):
        if found.end() > found.start():
            parts.append(text[start : found.start()])
            start = found.end()
    return array_json([*parts, text[start:]])


# -- texts -------------------------------------------------------------------------------------


def take_substring(text: str, start: int | str, count: int | None = None) -> str | None:
    """Return `count` characters starting at position `start`, counted from 1. If `start` is a
    pattern, return its match, or its first group."""
    if isinstance(start, str):
        found = compile_pattern(start).search(text)
        return _groups(found)[0] if found else None
    end = len(text) + 1 if count is None else max(start + count, 1)
    return text[max(start - 1, 0) : max(end - 1, 0)]


def split_part(text: str, separator: str, number: int) -> str:
    """Return the part with this number between separators, counted from 1, or from the end if
    negative."""
    parts = text.split(separator) if separator else [text]
    at = number - 1 if number > 0 else len(parts) + number
    return parts[at] if 0 <= at < len(parts) else ""


_DIRECTIVE: Final = re.compile(r"%(?:(\d+)\$)?(-?)(\d*)([sIL%])")


def format_text(template: str, *values: Any) -> str:
    """Fill in ``%s``, ``%I`` and ``%L`` in a template."""
    place = iter(range(len(values)))

    def fill(found: re.Match[str]) -> str:
        if found[4] == "%":
            return "%"
        value = values[int(found[1]) - 1] if found[1] else values[next(place)]
        if found[4] == "I":
            text = quote_identifier(str(value))
        elif found[4] == "L":
            text = "NULL" if value is None else quote_literal(str(value))
        else:
            text = "" if value is None else str(value)
        width = int(found[3] or 0)
        return text.ljust(width) if found[2] else text.rjust(width)

    try:
        return _DIRECTIVE.sub(fill, template)
    except (StopIteration, IndexError):
        raise CatalogQueryError("too few arguments for format()", "22023") from None


def pad_left(text: str, length: int, fill: str = " ") -> str:
    """Pad a text on the left, or truncate it, to a length."""
    missing = length - len(text)
    return text[:length] if missing <= 0 or not fill else (fill * missing)[:missing] + text


def pad_right(text: str, length: int, fill: str = " ") -> str:
    """Pad a text on the right, or truncate it, to a length."""
    missing = length - len(text)
    return text[:length] if missing <= 0 or not fill else text + (fill * missing)[:missing]


def take_left(text: str, count: int) -> str:
    """Return the first `count` characters; if negative, all but the last ones."""
    return text[:count]


def take_right(text: str, count: int) -> str:
    """Return the last `count` characters; if negative, all but the first ones."""
    return text[-count:] if count > 0 else ("" if count == 0 else text[-count:])


_SIZES: Final = ("bytes", "kB", "MB", "GB", "TB", "PB")


def format_size(size: int) -> str:
    """Format a size in bytes in readable units.

    >>> format_size(8192), format_size(123456789)
    ('8192 bytes', '118 MB')
    """
    value, unit = float(size), 0
    # PostgreSQL switches to the next unit at 10 * 1024, and rounds half up.
    while abs(value) >= 10 * 1024 and unit < len(_SIZES) - 1:
        value /= 1024
        unit += 1
    return f"{int(value + 0.5) if unit else int(value)} {_SIZES[unit]}"


# -- arrays ------------------------------------------------------------------------------------


def join_array(array: str | None, separator: str | None, null: str | None = None) -> str | None:
    """Join an array's elements with a separator. NULLs are omitted, or replaced by `null`."""
    if array is None or separator is None:
        return None
    flat: list[Any] = []

    def add(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, list):
                add(value)
            elif value is not None or null is not None:
                flat.append(null if value is None else value)

    add(json.loads(array))
    return separator.join(str(value) for value in flat)


def split_text(text: str, separator: str | None, null: str | None = None) -> str | None:
    """Split a text into an array: at a separator, or into characters if it is NULL. Parts equal to
    `null` become NULL."""
    if text is None:
        return None
    if separator is None:
        parts = list(text)
    else:
        parts = text.split(separator) if separator else [text]
    # An empty text has no parts, instead of a single empty one.
    parts = parts if text else []
    return array_json(None if null is not None and part == null else part for part in parts)


def array_length(array: str, dimension: int = 1) -> int | None:
    """Return the length of a dimension of an array; NULL if it is empty."""
    values = json.loads(array)
    for _ in range(dimension - 1):
        values = values[0] if values and isinstance(values[0], list) else []
    return len(values) or None


def count_elements(array: str) -> int:
    """Return the total number of elements of an array."""
    values = json.loads(array)
    return sum(len(each) if isinstance(each, list) else 1 for each in values)


def array_position(array: str, wanted: Any, start: int = 1) -> int | None:
    """Return the position of a value in an array, counted from 1; NULL if it is missing."""
    values = json.loads(array)
    for at in range(start - 1, len(values)):
        if values[at] == wanted:
            return at + 1
    return None


def array_subscript(array: str, at: int) -> Any:
    """Return the element at a position, counted from 0; NULL beyond the ends."""
    values = json.loads(array)
    if not 0 <= at < len(values):
        return None
    value = values[at]
    return array_json(value) if isinstance(value, list) else value


def array_slice(array: str, low: int | None, high: int | None) -> str:
    """Return the elements between two positions, counted from 0, both inclusive."""
    values = json.loads(array)
    end = len(values) if high is None else max(high + 1, 0)
    return array_json(values[max(low or 0, 0) : end])


def array_append(array: str | None, value: Any) -> str:
    """Append an element to an array."""
    return array_json([*json.loads(array or "[]"), value])


def array_prepend(value: Any, array: str | None) -> str:
    """Prepend an element to an array."""
    return array_json([value, *json.loads(array or "[]")])


def array_concat(left: str | None, right: str | None) -> str | None:
    """Concatenate two arrays."""
    if left is None or right is None:
        return left if right is None else right
    return array_json([*json.loads(left), *json.loads(right)])


def array_remove(array: str, value: Any) -> str:
    """Return an array without the elements equal to a value."""
    return array_json(each for each in json.loads(array) if each != value)


def array_contains(array: str, other: str) -> int:
    """Return whether an array contains all elements of another: ``@>``."""
    held = json.loads(array)
    return int(all(each in held for each in json.loads(other)))


def arrays_overlap(array: str, other: str) -> int:
    """Return whether two arrays have an element in common: ``&&``."""
    held = json.loads(array)
    return int(any(each in held for each in json.loads(other)))


SERIES_MAX: Final = 100_000
"""Maximum length of a `generate_series`. Catalog queries enumerate columns, or days of a year."""


def make_series(start: int, stop: int, step: int = 1) -> str:
    """Return an array of the numbers from start to stop (inclusive). Raises `CatalogQueryError`."""
    if abs(stop - start) > SERIES_MAX * abs(step):
        raise CatalogQueryError(
            f"generate_series: too many numbers (limit {SERIES_MAX})", PROGRAM_LIMIT
        )
    return array_json(range(start, stop + (1 if step > 0 else -1), step))


def make_subscripts(array: str, dimension: int, first: int) -> str:
    """Return the subscripts of an array's elements, which start at `first`."""
    count = array_length(array, dimension) or 0
    return array_json(range(first, first + count))


def zip_arrays(*arrays: str | None) -> str:
    """Return the rows of `unnest` with several arrays; shorter ones are padded with NULLs."""
    held = [json.loads(array or "[]") for array in arrays]
    rows = zip_longest(*held)
    return array_json({f"f{at}": value for at, value in enumerate(row, start=1)} for row in rows)


def write_array(value: str, type_oid: int) -> str:
    """Format an array, vector or record, stored as JSON, in PostgreSQL's text format."""
    # Records are JSON objects.
    held = json.loads(value)
    if isinstance(held, dict):
        texts = ("" if each is None else str(each) for each in held.values())
        return "(" + ",".join(texts) + ")"
    if ELEMENT_OF.get(type_oid) == BOOL:
        held = [None if each is None else bool(each) for each in held]
    return format_catalog_value(held, type_oid) or ""


def array_of_texts(value: str, element: int) -> str:
    """Convert the elements of an array, of type `element`, to text."""

    def shown(held: Any) -> Any:
        if isinstance(held, list):
            return [shown(each) for each in held]
        return format_catalog_value(
            bool(held) if element == BOOL and held is not None else held, 25
        )

    return array_json(shown(json.loads(value)))


# -- JSON --------------------------------------------------------------------------------------


def _json_value(value: Any, kind: str) -> Any:
    """Convert a stored value for JSON: `kind` is b for a Boolean, j for JSON or an array, else
    x."""
    if value is None or kind == "x":
        return value
    return bool(value) if kind == "b" else json.loads(value)


def _write_json(value: Any) -> str:
    # PostgreSQL puts spaces around the colon in the JSON that it builds.
    return json.dumps(value, separators=(", ", " : "), ensure_ascii=False)


def build_json_object(kinds: str, *values: Any) -> str:
    """Build an object from alternating keys and values; `kinds` has a letter for each."""
    made = [_json_value(value, kind) for value, kind in zip(values, kinds, strict=True)]
    return _write_json(dict(zip((str(key) for key in made[::2]), made[1::2], strict=True)))


def build_json_array(kinds: str, *values: Any) -> str:
    """Build a JSON array; `kinds` has a letter for each value."""
    made = [_json_value(value, kind) for value, kind in zip(values, kinds, strict=True)]
    return json.dumps(made, separators=(", ", " : "), ensure_ascii=False)


def value_to_json(kinds: str, value: Any) -> str:
    """Convert one value to JSON; `kinds` is its letter."""
    return _write_json(_json_value(value, kinds))


def quote_nullable(value: Any) -> str:
    """Quote a value as an SQL literal, or return NULL."""
    return "NULL" if value is None else quote_literal(str(value))


def encoding_name(number: int) -> str:
    """Return the name of an encoding; "" if it is unknown."""
    return {0: "SQL_ASCII", 6: "UTF8", 8: "LATIN1"}.get(number, "")


def encoding_number(name: str) -> int:
    """Return the number of an encoding; -1 if it is unknown."""
    return {"utf8": 6, "unicode": 6, "sqlascii": 0, "latin1": 8}.get(
        name.lower().replace("-", "").replace("_", ""), -1
    )


def option_rows(options: str | None) -> str:
    """Return the rows of `pg_options_to_table`: the names and values of options."""
    rows = [str(option).partition("=") for option in json.loads(options or "[]")]
    return array_json(
        {"option_name": name, "option_value": value if mark else None} for name, mark, value in rows
    )


def expand_array(array: str, first: int = 1) -> str:
    """Return the rows of `information_schema._pg_expandarray`: elements with their positions."""
    del first
    return array_json({"x": value, "n": at} for at, value in enumerate(json.loads(array), start=1))


_PRIVILEGES: Final = {
    "a": "INSERT",
    "r": "SELECT",
    "w": "UPDATE",
    "d": "DELETE",
    "D": "TRUNCATE",
    "x": "REFERENCES",
    "t": "TRIGGER",
    "X": "EXECUTE",
    "U": "USAGE",
    "C": "CREATE",
    "T": "TEMPORARY",
    "c": "CONNECT",
    "s": "SET",
    "A": "ALTER SYSTEM",
}
_DEFAULT_PRIVILEGES: Final = {
    # The owner's privileges, then those of PUBLIC.
    "r": ("arwdDxt", ""),
    "S": ("rwU", ""),
    "f": ("X", "X"),
    "n": ("UC", ""),
    "d": ("CTc", "Tc"),
    "T": ("U", "U"),
    "l": ("U", "U"),
    "t": ("C", ""),
    "F": ("U", ""),
    "p": ("sA", ""),
}
_ACL_ITEM: Final = re.compile(r'("(?:[^"]|"")*"|[^=]*)=([^/]*)/(.*)', re.S)


def default_privileges(kind: str, owner: str) -> str:
    """Return the privileges of an object without any grants, as `acldefault` does."""
    owned, public = _DEFAULT_PRIVILEGES.get(kind, ("", ""))
    items = [f"={public}/{owner}"] if public else []
    return array_json([*items, f"{owner}={owned}/{owner}"] if owned else items)


def explode_privileges(items: str | None, role_oids: Callable[[str], int]) -> str:
    """Return the rows of `aclexplode`; `role_oids` returns the OID of a role, 0 for PUBLIC."""
    rows = []
    for item in json.loads(items or "[]"):
        found = _ACL_ITEM.fullmatch(item)
        if found is None:
            raise CatalogQueryError(f"invalid privileges {item!r}", NOT_SUPPORTED)
        # A star marks a privilege with grant option.
        for letter, option in re.findall(r"([a-zA-Z])(\*?)", found[2]):
            rows.append(
                {
                    "grantor": role_oids(found[3].strip('"')),
                    "grantee": role_oids(found[1].strip('"')),
                    "privilege_type": _PRIVILEGES[letter],
                    "is_grantable": int(bool(option)),
                }
            )
    return array_json(rows)


def hash_text(text: str) -> str:
    """Return the MD5 hash of a text in hexadecimal."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


PURE_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "regexp_replace": replace_pattern,
    "regexp_match": match_groups,
    "regexp_matches": find_all_groups,
    "regexp_split_to_array": split_by_pattern,
    "regexp_split_to_table": split_by_pattern,
    "regexp_like": match_pattern,
    "substring": take_substring,
    "substr": take_substring,
    "quote_ident": quote_identifier,
    "quote_literal": lambda text: quote_literal(str(text)),
    "quote_nullable": quote_nullable,
    "split_part": split_part,
    "format": format_text,
    "lpad": pad_left,
    "rpad": pad_right,
    "left": take_left,
    "right": take_right,
    "reverse": lambda text: text[::-1],
    "initcap": str.title,
    "md5": hash_text,
    "starts_with": lambda text, head: int(text.startswith(head)),
    "ascii": lambda text: ord(text[0]) if text else 0,
    "pg_size_pretty": format_size,
    "array_to_string": join_array,
    "string_to_array": split_text,
    "string_to_table": split_text,
    "array_length": array_length,
    "array_ndims": lambda array: 1 if json.loads(array) else None,
    "cardinality": count_elements,
    "array_position": array_position,
    "array_append": array_append,
    "array_prepend": array_prepend,
    "array_cat": array_concat,
    "array_remove": array_remove,
    "generate_series": make_series,
    "pg_encoding_to_char": encoding_name,
    "pg_char_to_encoding": encoding_number,
    "pg_options_to_table": option_rows,
    "parse_ident": lambda text, strict=1: array_json(split_name(text)),
    "_pg_expandarray": expand_array,
}
"""Maps PostgreSQL's names to functions. A set-returning function returns an array."""

NULL_TAKERS: Final = frozenset(
    {
        "array_append",
        "array_cat",
        "array_prepend",
        "array_to_string",
        "array_position",
        "format",
        "pg_options_to_table",
        "quote_nullable",
        "string_to_array",
        "string_to_table",
    }
)
"""Functions of `PURE_FUNCTIONS` that are also called with NULLs."""

OPERATOR_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "pg_subscript": array_subscript,
    "pg_slice": array_slice,
    "pg_contains": array_contains,
    "pg_overlap": arrays_overlap,
    "pg_subscripts": make_subscripts,
    "pg_write_array": write_array,
    "pg_array_of_texts": array_of_texts,
    "pg_read_text": read_text,
    "pg_json_object": build_json_object,
    "pg_json_array": build_json_array,
    "pg_json_value": value_to_json,
    "pg_zip_arrays": zip_arrays,
}
"""Functions that implement operators and special syntax, by their names in SQLite."""
OPERATOR_NULL_TAKERS: Final = frozenset(
    {
        "pg_slice",
        "pg_json_object",
        "pg_json_array",
        "pg_json_value",
        "pg_zip_arrays",
    }
)
"""Functions of `OPERATOR_FUNCTIONS` that are also called with NULLs."""

"""Calls of Spark's functions with drawn arguments, and canaries that none of them may reach. Pure.

The arguments name a file, a host, an address, a class, an environment variable and a property, each
of which has a text of its own in it. `CallDrawer` makes expressions of them: literals of each type,
columns of rows, lambdas, options, schemas as DDL and as JSON, XML with a DTD, and other calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import Final

from actors.engine.catalyst.permitted_functions import (
    FUNCTION_NAMES,
    REFUSED_NAMES,
    TABLE_FUNCTION_NAMES,
)

ARGUMENTS_MAX: Final = 5
CALLABLE: Final = tuple(
    sorted(name for name in FUNCTION_NAMES | REFUSED_NAMES if name.replace("_", "").isalnum())
)
"""Functions with names; operators are covered by expressions that others draw."""
TABLE_CALLABLE: Final = tuple(sorted(TABLE_FUNCTION_NAMES | {"python_worker_logs"}))
_PLAIN: Final = (
    *(
        "1",
        "-1",
        "0",
        "7L",
        "3S",
        "2Y",
        "1.5",
        "2.5BD",
        "1e3",
        "CAST(1.5 AS FLOAT)",
        "true",
        "NULL",
    ),
    *(
        "''",
        "'abc'",
        "'1'",
        "'2020-01-02'",
        "'12:30:00'",
        "'UTC'",
        "'yyyy-MM-dd'",
        "'%s %d'",
        "X'1F'",
    ),
    *("'[a-z]+'", "'a INT'", "'utf-8'", "'AES'", "'GCM'", "'0000111122223333'", "'a,b'", "'day'"),
    *("DATE'2020-01-02'", "TIMESTAMP'2020-01-02 03:04:05'", "TIMESTAMP_NTZ'2020-01-02 03:04:05'"),
    *("INTERVAL '1' DAY", "INTERVAL '2' MONTH", "array(1, 2)", "array('a', 'b')", "map('a', 1)"),
    *("named_struct('a', 1, 'b', 'x')", "parse_json('{\"a\": 1}')", "array(map('a', 1))"),
    *("x -> x", "(x, y) -> x", "x -> x > 1", "(x, y) -> x = y", "(x, y, z) -> x"),
)
_TEXT: Final = re.compile(r"'(?:[^'\\\\]|\\\\.)*'")
_COLUMNS: Final = ("i", "s", "d", "t", "b", "x", "m", "st")
ROWS: Final = (
    "(SELECT CAST(id AS INT) AS i, concat('{path}', CAST(id AS STRING)) AS s, "
    "DATE'2020-01-02' AS d, TIMESTAMP'2020-01-02 03:04:05' AS t, CAST('{path}' AS BINARY) AS b, "
    "array('{path}', '{url}') AS x, map('path', '{path}') AS m, "
    "named_struct('path', '{path}') AS st FROM range(2)) AS rows"
)
"""Rows whose values are known to the execution alone."""


@dataclass(frozen=True)
class Canaries:
    """What the arguments name. `marks` are in no other file, address or class of the machine."""

    folder: str
    """A folder, which is watched."""
    port: int
    """A port of loopback, at which nobody may call."""
    secrets: tuple[str, ...]
    """Texts of the file, of the environment and of a property: in no answer."""

    @property
    def path(self) -> str:
        """The file."""
        return f"{self.folder}/canaryfile.xml"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be in no call of the system."""
        return ("canaryfile", "canarymade", "canaryhost", "CanaryType", f"htons({self.port})")

    def texts(self) -> list[str]:
        """Arguments that name them, as texts of SQL."""
        path, url = self.path, f"http://127.0.0.1:{self.port}/canaryfile.dtd"
        dtd = '<?xml version="1.0"?><!DOCTYPE a SYSTEM "{}"><a><b>1</b></a>'
        entity = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY e SYSTEM "{}"> ]><a><b>&e;</b></a>'
        udt = '{"type":"udt","class":"penstock.CanaryType","pyClass":null,"sqlType":"string"}'
        member = f'{{"name":"a","type":{udt},"nullable":true,"metadata":{{}}}}'
        field = f'{{"type":"struct","fields":[{member}]}}'
        avro = '{"type":"record","name":"CanaryType","fields":[{"name":"a","type":"int"}]}'
        return [
            *(path, f"file://{path}", f"file:{path}", f"{self.folder}/canarymade", url),
            *("http://canaryhost.invalid/a", f"jdbc:h2:{self.folder}/canarymade"),
            *(f"jdbc:postgresql://127.0.0.1:{self.port}/a", f"ldap://127.0.0.1:{self.port}/a"),
            *("penstock.CanaryType", "java.lang.System", "getenv", "java.lang.Runtime"),
            *("PENSTOCK_CANARY", "${env:PENSTOCK_CANARY}", "${system:penstock.canary}"),
            *(
                "penstock.canary",
                "java.version",
                udt,
                field,
                avro,
                f"`{path}`",
                f"parquet.`{path}`",
            ),
            *(dtd.format(f"file://{path}"), dtd.format(url), entity.format(f"file://{path}")),
            *(
                entity.format(url),
                f'{{"$ref": "{url}"}}',
                f"$['{path}']",
                "a/b",
                "//b",
                "document(1)",
            ),
            f"document('{path}')",
            f'<a xmlns:xi="http://www.w3.org/2001/XInclude"><xi:include href="{path}"/></a>',
            f'<a xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" '
            f'xsi:noNamespaceSchemaLocation="{path}"/>',
        ]

    def options(self) -> list[str]:
        """Maps of options that name them, as texts of SQL."""
        names = ("path", "rowValidationXSDPath", "rowvalidationxsdpath", "avroSchemaUrl", "mode")
        made = [f"map('{name}', '{self.path}')" for name in names]
        made.append(f"map('rowTag', 'a', concat('rowValidation', 'XSDPath'), '{self.path}')")
        made.append(f"map('locale', '{self.path}', 'timeZone', 'canaryhost/invalid')")
        return [*made, "map('sampling' , 'a')", f"map('inferSchema', '{self.folder}/canarymade')"]


class CallDrawer:
    """Draws calls."""

    def __init__(self, rng: Random, canaries: Canaries) -> None:
        self._rng = rng
        self._texts = [_quoted(each) for each in canaries.texts()]
        self._options = canaries.options()
        self._rows = ROWS.format(path=canaries.path, url=f"http://127.0.0.1:{canaries.port}/a")

    def call(self, name: str, depth: int = 1) -> str:
        """A call of a function by this name."""
        given = [self._argument(depth) for _ in range(self._rng.choice((1, 1, 2, 2, 3, 4, 5, 0)))]
        if name.startswith(("from_", "schema_of_")) and self._rng.random() < 0.5:
            document = self._rng.choice(self._texts)
            given = [document, self._rng.choice(("'a STRING'", *self._texts)), *self._options[:1]]
            given[2] = self._rng.choice(self._options)
            given = given[: self._rng.choice((2, 3))] if name.startswith("from_") else given[::2]
        if name.startswith("xpath") or name == "from_xml":
            given[0:1] = [self._rng.choice(self._texts)]
        return f"{self._rng.choice((name, name, name.upper(), f'`{name}`'))}({', '.join(given)})"

    def _argument(self, depth: int) -> str:
        rng, kind = self._rng, self._rng.random()
        if kind < 0.35:
            return rng.choice(self._texts)
        if kind < 0.45:
            return rng.choice(self._options)
        if kind < 0.6:
            return rng.choice(_COLUMNS)
        if kind < 0.7 and depth > 0:
            return self.call(rng.choice(CALLABLE), depth - 1)
        return rng.choice(_PLAIN)

    def query(self, calls: list[str]) -> str:
        """A query of calls over rows."""
        columns = ", ".join(f"{call} AS c{n}" for n, call in enumerate(calls))
        return f"SELECT {columns} FROM {self._rows}"

    def example(self, text: str) -> str:
        """An example of the documentation, with other texts in place of some of its own."""
        rng = self._rng
        if rng.random() < 0.2:
            return text

        def other(found: re.Match[str]) -> str:
            return rng.choice(self._texts) if rng.random() < 0.4 else found[0]

        return _TEXT.sub(other, text)

    def table_query(self, name: str) -> str:
        """A query of a function that makes rows."""
        call = self.call(name)
        form = self._rng.choice(("SELECT * FROM {}", "SELECT r.* FROM {r}, LATERAL {} AS r"))
        return form.format(call, r=self._rows)


def _quoted(text: str) -> str:
    # A text of Spark's: what follows a backslash is itself.
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

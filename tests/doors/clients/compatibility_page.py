"""The compatibility page: ``python tests/doors/clients/compatibility_page.py`` writes it.

Tests of clients store what they saw in pytest's cache, and fail if the page disagrees
(`client_house.page_differences`). This program writes the stored results into the page. A client
without stored results keeps its entries.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from capabilities import DOORS, DoorTable, door_of
from sql_differences import SqlDifference, read_section, section_of

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = ROOT / "docs" / "reference" / "compatibility.md"
CACHE_KEY: Final = "penstock/clients"
SQL_KEY: Final = "penstock/sql-differences"
CACHE_FOLDER: Final = ROOT / ".pytest_cache" / "v" / CACHE_KEY
SQL_SEEN: Final = ROOT / ".pytest_cache" / "v" / SQL_KEY

Answer: TypeAlias = Literal["yes", "no", "lacks"]
SHOWN: Final[Mapping[Answer, str]] = {"yes": "yes", "no": "**no**", "lacks": "–"}
_ANSWERS: Final = {shown: answer for answer, shown in SHOWN.items()}
_REASON: Final = re.compile(r"^- ([^,]+), (.+?): (.+)$", re.MULTILINE)
HEAD: Final = """\
# Compatibility

This page lists what existing clients can do with Penstock: PostgreSQL drivers and tools,
Spark Connect clients, and dbt.

| | meaning |
|---|---|
| yes | it works |
| **no** | the service does not support it yet |
| – | the client does not have this feature |

The reasons are listed below each table. Every entry is checked by a test in `tests/doors/clients`,
which fails if this page disagrees with what it saw.

To update the page, run `make compatibility`, which writes it from the results of the last test run.
`make clients` installs the Python clients; pgjdbc and psqlODBC are Debian's
`libpostgresql-jdbc-java` and `odbc-postgresql`. Clients that are not installed are skipped.
"""


class Sighting(NamedTuple):
    """What a test saw of one capability of a client."""

    answer: Answer
    reason: str = ""


class ClientSight(NamedTuple):
    """What a test saw of one client, by capability."""

    name: str
    version: str
    seen: dict[str, Sighting]

    def as_json(self) -> dict[str, Any]:
        """Return it as stored in pytest's cache."""
        return {"name": self.name, "version": self.version, "seen": self.seen}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClientSight:
        """Return the sight that `as_json` encoded."""
        seen = {key: Sighting(*told) for key, told in data["seen"].items()}
        return cls(data["name"], data["version"], seen)


def read_sight(lines: str) -> ClientSight:
    """Parse the output of a client's program; see `client_probe`."""
    name = version = ""
    seen: dict[str, Sighting] = {}
    for line in lines.splitlines():
        match line.split("\t"):
            case ["client", name, version]:
                pass
            case ["yes" | "no" | "lacks" as answer, key, *rest]:
                # What was asked twice can be done only if both went well.
                if seen.get(key, Sighting("yes")).answer == "yes":
                    seen[key] = Sighting(answer, " ".join(rest))
    return ClientSight(name, version, seen)


# -- the page --------------------------------------------------------------------------------------


def page_of(sights: Mapping[str, ClientSight], differences: Sequence[SqlDifference]) -> str:
    """Return the page. A client that was never tested has empty cells."""
    tables = (_table(door, sights) for door in DOORS)
    return "\n".join([HEAD, *tables, section_of(differences)])


def _table(door: DoorTable, sights: Mapping[str, ClientSight]) -> str:
    columns = [sights.get(name, ClientSight(name, "?", {})) for name in door.clients]
    heads = " | ".join(f"{each.name} {each.version}" for each in columns)
    lines = [
        f"## {door.title}",
        "",
        door.told,
        "",
        f"| | {heads} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    reasons = []
    for key, title in door.capabilities.items():
        cells = []
        for each in columns:
            found = each.seen.get(key)
            cells.append("" if found is None else SHOWN[found.answer])
            if found is not None and found.answer != "yes":
                reasons.append(f"- {each.name}, {title}: {found.reason}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *reasons, ""])


def read_page(text: str) -> dict[str, ClientSight]:
    """Parse what a page says of each client."""
    found: dict[str, ClientSight] = {}
    for door in DOORS:
        section = text.partition(f"## {door.title}\n")[2].partition("\n## ")[0]
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in section.splitlines()
            if line.startswith("|") and not line.startswith("|---")
        ]
        if not rows:
            continue
        reasons = {(client, title): why for client, title, why in _REASON.findall(section)}
        keys = {title: key for key, title in door.capabilities.items()}
        for place, head in enumerate(rows[0][1:], 1):
            name, _, version = head.rpartition(" ")
            seen = {}
            for row in rows[1:]:
                if row[0] in keys and row[place] in _ANSWERS:
                    why = reasons.get((name, row[0]), "")
                    seen[keys[row[0]]] = Sighting(_ANSWERS[row[place]], why)
            found[name] = ClientSight(name, version, seen)
    return found


def differences(text: str, sight: ClientSight) -> list[str]:
    """Return the differences between a page and a test's results for a client. Versions, and the
    error texts of failures, may differ."""
    said = read_page(text).get(sight.name, ClientSight(sight.name, "", {})).seen
    wrong = []
    for key, title in door_of(sight.name).capabilities.items():
        seen, told = sight.seen.get(key), said.get(key)
        if seen is None:
            wrong.append(f"{sight.name} was not asked for: {title}")
        elif told is None or told.answer != seen.answer:
            page = "nothing" if told is None else told.answer
            wrong.append(f"{sight.name}, {title}: {seen.answer} {seen.reason}; the page: {page}")
        elif seen.answer == "lacks" and told.reason != seen.reason:
            wrong.append(f"{sight.name}, {title}: {seen.reason}; the page: {told.reason}")
    return wrong


def write_page() -> None:
    """Write the results in pytest's cache into the page."""
    page = PAGE.read_text() if PAGE.exists() else ""
    sights, differences = read_page(page), read_section(page)
    for path in sorted(CACHE_FOLDER.glob("*")):
        sight = ClientSight.from_json(json.loads(path.read_text()))
        sights[sight.name] = sight
    if SQL_SEEN.exists():
        differences = [SqlDifference(*told) for told in json.loads(SQL_SEEN.read_text())]
    PAGE.write_text(page_of(sights, differences))


if __name__ == "__main__":
    write_page()
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} is written\n")

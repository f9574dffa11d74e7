"""The read that the options of ``spark.read.format("penstock")`` ask for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from actors.durable.persist.attach import StoreLocation, store_location, suggest_names
from actors.runtime.errors import InvalidUsage
from actors.runtime.progress import EMPTY, Time

NEWEST: Final = "newest"
SNAPSHOT: Final = "snapshot"
CHANGE_COLUMNS: Final = ("_time", "_diff")
KNOWN: Final = (
    "stateDir",
    "blobUrl",
    "consensusUrl",
    "shard",
    "object",
    "asOf",
    "waitMs",
    "changes",
    "startingTime",
    "consumer",
    "partitionBytes",
    "sumRowsMax",
    "maxRowsPerBatch",
)
_OF_CHANGES: Final = ("startingTime", "consumer", "maxRowsPerBatch")
_PARTITION_BYTES: Final = 32 * 1024 * 1024
_SUM_ROWS: Final = 1_000_000


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A read, as its options ask for it."""

    place: StoreLocation
    shard: str | None
    object: str | None
    as_of: Time | None
    """Time of the read; None: the newest that is sealed when it is loaded."""
    wait_ms: int
    changes: bool
    """True for updates with their time and diff, false for rows."""
    start: Time | str
    """Start of a stream: `NEWEST`, `SNAPSHOT` (all there is, then changes), or a time."""
    consumer: str | None
    partition_bytes: int
    """Bytes of the stored parts that one task reads; a single part may be larger."""
    sum_rows_max: int
    """Rows that one task keeps in memory to sum equal ones."""
    batch_rows_max: int | None


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Return the read that options ask for; Spark compares their names without regard to case.
    Raises `InvalidUsage`."""
    known = {name.lower(): name for name in KNOWN}
    given: dict[str, str] = {}
    for name, value in options.items():
        if name.lower() == "path":
            raise InvalidUsage(
                f"{value!r} was given to load(): leave it empty, and say what to read by option"
                " 'shard' or 'object'"
            )
        if name.lower() not in known:
            raise InvalidUsage(
                f"there is no option {name!r}; {suggest_names(name, KNOWN, 'options')}"
            )
        given[known[name.lower()]] = value
    if ("shard" in given) == ("object" in given):
        raise InvalidUsage(
            "say what to read: option 'shard' with a shard's id, or option 'object' with the name"
            " of a table or view, and not both"
        )
    start = given.get("startingTime", SNAPSHOT)
    changes = given.get("changes", "false").lower()
    if changes not in ("true", "false"):
        raise InvalidUsage(f"option changes is {changes!r}: write true or false")
    strange = [name for name in _OF_CHANGES if name in given and changes == "false"]
    if strange:
        raise InvalidUsage(
            f"option {strange[0]} is of changes, and rows are read here: leave it out, or add"
            ' .option("changes", "true")'
        )
    return ReadOptions(
        place=store_location(
            given.get("stateDir"), given.get("blobUrl"), given.get("consensusUrl")
        ),
        shard=given.get("shard"),
        object=given.get("object"),
        as_of=_number(given, "asOf", EMPTY - 1),
        wait_ms=_number(given, "waitMs", 24 * 3_600_000) or 0,
        changes=changes == "true",
        start=start if start in (NEWEST, SNAPSHOT) else _number(given, "startingTime", EMPTY) or 0,
        consumer=_consumer(given.get("consumer")),
        partition_bytes=max(1, _number(given, "partitionBytes", 1 << 40) or _PARTITION_BYTES),
        sum_rows_max=max(1, _number(given, "sumRowsMax", 1 << 31) or _SUM_ROWS),
        batch_rows_max=_number(given, "maxRowsPerBatch", 1 << 40, least=1),
    )


def _number(given: Mapping[str, str], name: str, most: int, least: int = 0) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    digits = text.strip()
    # `isdigit` alone takes digits that `int` refuses (²).
    whole = digits.isascii() and digits.isdigit() and len(digits) <= 20
    if not (whole and least <= int(digits) <= most):
        also = f", {NEWEST} or {SNAPSHOT}" if name == "startingTime" else ""
        raise InvalidUsage(
            f"option {name} is {text!r}: write a whole number from {least} to {most}{also}"
        )
    return int(text)


def _consumer(name: str | None) -> str | None:
    if name is not None and not (name.isprintable() and 0 < len(name) <= 128):
        raise InvalidUsage(f"option consumer is {name!r}: write a name of 1 to 128 characters")
    return name

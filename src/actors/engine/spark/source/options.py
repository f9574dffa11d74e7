"""Parses the options of ``spark.read.format("penstock")`` into a description of the read. Pure."""

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
    """A read as described by its options."""

    place: StoreLocation
    shard: str | None
    object: str | None
    as_of: Time | None
    """Time of the read; None for the newest that is sealed when it is loaded."""
    wait_ms: int
    changes: bool
    """True for updates with their time and diff, False for rows."""
    start: Time | str
    """Start of a stream: `NEWEST`, `SNAPSHOT` (all existing rows, then changes), or a time."""
    consumer: str | None
    partition_bytes: int
    """Size of the stored parts that one task reads; a single part may be larger."""
    sum_rows_max: int
    """Maximum number of rows that one task keeps in memory to sum equal ones."""
    batch_rows_max: int | None


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Return the read that the options describe. Spark compares their names case-insensitively.
    Raises `InvalidUsage`."""
    known = {name.lower(): name for name in KNOWN}
    given: dict[str, str] = {}
    for name, value in options.items():
        if name.lower() == "path":
            raise InvalidUsage(
                f"load() takes no path, got {value!r}: use option 'shard' or 'object'"
            )
        if name.lower() not in known:
            raise InvalidUsage(f"unknown option {name!r}; {suggest_names(name, KNOWN, 'options')}")
        given[known[name.lower()]] = value
    if ("shard" in given) == ("object" in given):
        raise InvalidUsage(
            "give either option 'shard', the id of a shard, or option 'object', the name of a"
            " table or view"
        )
    start = given.get("startingTime", SNAPSHOT)
    changes = given.get("changes", "false").lower()
    if changes not in ("true", "false"):
        raise InvalidUsage(f"invalid option changes {changes!r}: expected true or false")
    strange = [name for name in _OF_CHANGES if name in given and changes == "false"]
    if strange:
        raise InvalidUsage(
            f"option {strange[0]} is only for reading changes: remove it, or add"
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
    # `isdigit` alone accepts digits that `int` rejects (²).
    whole = digits.isascii() and digits.isdigit() and len(digits) <= 20
    if not (whole and least <= int(digits) <= most):
        also = f", {NEWEST} or {SNAPSHOT}" if name == "startingTime" else ""
        raise InvalidUsage(
            f"invalid option {name} {text!r}: expected a whole number from {least} to {most}{also}"
        )
    return int(text)


def _consumer(name: str | None) -> str | None:
    if name is not None and not (name.isprintable() and 0 < len(name) <= 128):
        raise InvalidUsage(
            f"invalid option consumer {name!r}: expected a name of 1 to 128 characters"
        )
    return name

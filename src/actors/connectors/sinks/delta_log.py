"""Parses the log of a Delta table, and checks commits of other writers. Pure.

A commit is a file of the log, with one action per line. Commits that only move rows between files
(OPTIMIZE), remove unused files (VACUUM) or set properties never conflict with a sink. A commit that
changes data does not conflict with a sink that only appends, but is an error for one that keeps the
table equal to an object's contents. A commit with a transaction of our application id comes from
another writer of the same sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from actors.runtime.errors import InvalidUsage

FEATURES: Final = frozenset(
    {
        "timestampNtz",
        "appendOnly",
        "invariants",
        "checkConstraints",
        "changeDataFeed",
        "domainMetadata",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
"""Table features that require nothing from a writer (constraints only if there are none)."""


WRITER: Final = "penstockWriter"
"""Key of the writer's token in a commit's metadata."""


class SetTransaction(msgspec.Struct, frozen=True, rename="camel"):
    """A transaction identifier of an application."""

    app_id: str
    version: int


class _DataFile(msgspec.Struct, frozen=True, rename="camel"):
    """The file of an add or remove action."""

    path: str
    data_change: bool = True


class _Action(msgspec.Struct, frozen=True, rename="camel"):
    """One line of a log file. Unknown kinds are ignored."""

    commit_info: dict[str, Any] | None = None
    txn: SetTransaction | None = None
    add: _DataFile | None = None
    remove: _DataFile | None = None
    meta_data: dict[str, Any] | None = None
    protocol: dict[str, Any] | None = None


class DeltaCommit(msgspec.Struct, frozen=True):
    """One version of the table, as far as sinks need it."""

    version: int
    operation: str
    transactions: tuple[SetTransaction, ...]
    changes_data: bool
    writer: str = ""
    """The writer's token in the commit's metadata; "" if there is none."""


def parsed(version: int, lines: bytes) -> DeltaCommit:
    """Parse a file of the log. Raises `InvalidUsage`."""
    operation, transactions, changes, writer = "?", [], False, ""
    for line in lines.splitlines():
        if not line.strip():
            continue
        try:
            action = msgspec.json.decode(line, type=_Action)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidUsage(
                f"cannot read version {version} of the table's log: {error}"
            ) from None
        if action.commit_info is not None:
            operation = str(action.commit_info.get("operation", "?"))
            writer = str(action.commit_info.get(WRITER, ""))
        if action.txn is not None:
            transactions.append(action.txn)
        for file in (action.add, action.remove):
            changes = changes or (file is not None and file.data_change)
    return DeltaCommit(version, operation, tuple(transactions), changes, writer)


def check_others(commits: Iterable[DeltaCommit], where: str, *, contents: bool) -> None:
    """Raise `InvalidUsage` for commits of others that conflict with this sink.

    `contents` means that the table must equal an object's contents.
    """
    for commit in commits:
        if contents and commit.changes_data:
            raise InvalidUsage(
                f"{where} was changed by another writer: version {commit.version} "
                f"({commit.operation}) changes its rows, so it no longer equals the object's "
                "contents. Drop the sink, remove the table, and create the sink again (or create "
                "one with mode changes, which allows other writers)"
            )


def check_table(
    columns: Mapping[str, str],
    wanted: Mapping[str, str],
    partitioned_by: Iterable[str],
    configuration: Mapping[str, str],
    features: Iterable[str],
    where: str,
    *,
    contents: bool,
) -> None:
    """Raise `InvalidUsage` if this sink cannot write to the table. `columns` and `wanted` map
    column names to types."""
    wrong: list[str] = []
    if dict(columns) != dict(wanted):
        wrong.append(f"its columns are {_listed(columns)}, not {_listed(wanted)}")
    partitions = list(partitioned_by)
    if partitions:
        wrong.append(f"it is partitioned by {', '.join(partitions)}")
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        wrong.append("it maps column names")
    if contents and configuration.get("delta.appendOnly", "false") == "true":
        wrong.append("it is append-only (delta.appendOnly), but rows must be removed from it")
    constraints = sorted(key for key in configuration if key.startswith("delta.constraints."))
    if constraints:
        wrong.append(f"it has constraints ({', '.join(constraints)}), which the sink cannot check")
    unknown = sorted(set(features) - FEATURES)
    if unknown:
        wrong.append(
            f"it requires writer features that the sink does not support ({', '.join(unknown)})"
        )
    if wrong:
        raise InvalidUsage(
            f"{where} does not fit the sink: {'; '.join(wrong)}. Undo that, or use another folder "
            "for the sink"
        )


def _listed(columns: Mapping[str, str]) -> str:
    return "(" + ", ".join(f"{name} {kind}" for name, kind in columns.items()) + ")"

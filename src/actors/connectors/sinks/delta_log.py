"""Parses the log of a Delta table, and checks commits of others. Pure.

A commit is a file of the log, an action a line. Commits that only move rows between files
(OPTIMIZE), remove unused files (VACUUM), or set properties are harmless to any sink. One that
changes data is harmless to a sink that only appends, and an error for one that keeps the table
equal to an object's contents. One with a transaction of our application id is another writer of
this very sink.
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
"""Table features that ask nothing of a writer; of constraints only when there are none."""


WRITER: Final = "penstockWriter"
"""Key of the writer's token in a commit's metadata."""


class SetTransaction(msgspec.Struct, frozen=True, rename="camel"):
    """An application's transaction."""

    app_id: str
    version: int


class _DataFile(msgspec.Struct, frozen=True, rename="camel"):
    path: str
    data_change: bool = True


class _Action(msgspec.Struct, frozen=True, rename="camel"):
    """One line; unknown kinds are ignored."""

    commit_info: dict[str, Any] | None = None
    txn: SetTransaction | None = None
    add: _DataFile | None = None
    remove: _DataFile | None = None
    meta_data: dict[str, Any] | None = None
    protocol: dict[str, Any] | None = None


class DeltaCommit(msgspec.Struct, frozen=True):
    """One version of the table."""

    version: int
    operation: str
    transactions: tuple[SetTransaction, ...]
    changes_data: bool
    writer: str = ""
    """`WRITER` of the commit's metadata."""


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
                f"version {version} of the table's log cannot be read: {error}"
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
    """Raise `InvalidUsage` for commits of others that conflict with this sink. `contents`: the
    table must equal an object's contents."""
    for commit in commits:
        if contents and commit.changes_data:
            raise InvalidUsage(
                f"{where} was changed by another: version {commit.version} "
                f"({commit.operation}) changes its rows, so that it is no longer what the sink "
                "keeps there. Drop the sink, remove the table, and create the sink anew (or one "
                "of changes, beside which others may write)"
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
    """Raise `InvalidUsage` when this sink can no longer write the table. `columns`, `wanted`: name
    → type as text."""
    wrong: list[str] = []
    if dict(columns) != dict(wanted):
        wrong.append(f"its columns are {_listed(columns)}, not {_listed(wanted)}")
    partitions = list(partitioned_by)
    if partitions:
        wrong.append(f"it is partitioned by {', '.join(partitions)}")
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        wrong.append("it maps column names")
    if contents and configuration.get("delta.appendOnly", "false") == "true":
        wrong.append("it is append-only (delta.appendOnly), and rows must be removed from it")
    constraints = sorted(key for key in configuration if key.startswith("delta.constraints."))
    if constraints:
        wrong.append(f"it has constraints ({', '.join(constraints)}), which the sink cannot check")
    unknown = sorted(set(features) - FEATURES)
    if unknown:
        wrong.append(f"it needs {', '.join(unknown)} of its writers, which the sink has not")
    if wrong:
        raise InvalidUsage(
            f"{where} does not fit the sink: {'; '.join(wrong)}. Undo that, or give the sink "
            "another folder"
        )


def _listed(columns: Mapping[str, str]) -> str:
    return "(" + ", ".join(f"{name} {kind}" for name, kind in columns.items()) + ")"

"""The audit log: a line for each statement of a client, and for each login.

Lines go to the logger ``penstock.audit``, if `audit_statements` is set: who asked from where, for
what, on which objects, how it ended, how long it took, and the text with its secrets blanked. A
text that cannot be read is left out, as its secrets cannot be found. All values are JSON, so that
nothing that a client sends begins a line of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import anyio

from actors.engine.sql.redaction import redact_text
from actors.engine.sql.statements import (
    ChangeStatement,
    SqlStatement,
    TextSpan,
    parts_in,
)
from actors.engine.sql.tokens import SqlDialect
from actors.engine.views.query_analysis import find_mentioned_tables
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.audit")


DONE: Final = "done"
_NAMES: Final = ("name", "names", "table", "object", "source_name", "role")
"""Fields of statements that name objects or roles."""
_KINDS: Final = {
    "ALTER": "AlterObject",
    "COMMENT": "CommentOn",
    "DROP": "DropObjects",
    "DROP ROLE": "DropRoles",
}
"""Kinds in the lines of statements whose words are others."""
_SHOWN_MAX: Final = 32
"""Objects of one statement that a line names."""


class StatementAudit:
    """The audit of one client."""

    def __init__(
        self, settings: Settings, role: str, peer: str, dialect: SqlDialect, user: str = ""
    ) -> None:
        """Begin the audit of a client with this role ("": it has proved none).

        Args:
            settings: The service's.
            role: The role that it has proved.
            peer: Its address.
            dialect: The dialect of its texts.
            user: The name that it has given itself.
        """
        self.is_on = settings.audit_statements
        self._text_max = settings.audit_text_characters_max
        self._role = role
        self._user = user
        self._peer = peer
        self._dialect = dialect

    @contextmanager
    def statement(
        self,
        statement: SqlStatement | None,
        text: str,
        known: Mapping[str, Any] | None = None,
        *,
        kind: str = "",
        failures_only: bool = False,
    ) -> Iterator[None]:
        """Write the line of a statement when the block ends, with its outcome.

        Args:
            statement: The statement, parsed; None if it is none of the service's grammar.
            text: Its text.
            known: Objects that a query may name, by name.
            kind: Its kind, where there is no statement.
            failures_only: True if another line tells of its end, unless it fails here.
        """
        if not self.is_on:
            yield
            return
        began, outcome = anyio.current_time(), DONE
        try:
            yield
        except BaseException as error:
            # The class alone: a message may hold values of the statement.
            outcome = type(error).__name__ if isinstance(error, Exception) else "canceled"
            raise
        finally:
            if outcome != DONE or not failures_only:
                # Behind the statement, so that it does not wait for its line.
                name = kind if statement is None else kind_of(statement)
                shown = redact_text(text, self._dialect, statement)
                objects = objects_of_statement(statement, text, known or {})
                self._write(name, objects, outcome, anyio.current_time() - began, shown)

    def event(self, kind: str, outcome: str = DONE, objects: tuple[str, ...] = ()) -> None:
        """Write the line of something without a text, such as a login."""
        if self.is_on:
            self._write(kind, objects, outcome, 0.0, "")

    def _write(
        self, kind: str, objects: tuple[str, ...], outcome: str, seconds: float, text: str
    ) -> None:
        values = {
            "role": self._role,
            "user": self._user,
            "peer": self._peer,
            "kind": kind,
            "objects": objects[:_SHOWN_MAX],
            "outcome": outcome,
            "ms": round(seconds * 1000, 1),
            "text": text[: self._text_max],
        }
        log.info("%s", json.dumps(values))


def kind_of(statement: SqlStatement) -> str:
    """Return the kind of a statement.

    >>> from actors.engine.sql.grammar import parse_statement
    >>> kind_of(parse_statement("DROP TABLE t"))
    'DropObjects'
    """
    if isinstance(statement, ChangeStatement):
        verb, *_ = statement.command.split()
        on_objects = statement.kind is not None or verb == "COMMENT"
        if on_objects and (kind := _KINDS.get(verb)) is not None:
            return kind
        return _KINDS.get(statement.command) or statement.command.title().replace(" ", "")
    return type(statement).__name__.removesuffix("Statement")


def objects_of_statement(
    statement: SqlStatement | None, text: str, known: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the names that a statement has in its own place, and those of known objects that
    occur in its queries."""
    found: dict[str, None] = {}
    for name in _NAMES:
        value = getattr(statement, name, None)
        for each in value or () if name == "names" else (value,):
            if each:
                found[each if isinstance(each, str) else ".".join(each)] = None
    if statement is None or any(True for _ in parts_in(statement, TextSpan)):
        found |= dict.fromkeys(find_mentioned_tables(text, known))
    return tuple(found)

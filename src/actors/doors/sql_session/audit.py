"""The audit log: one line for each statement of a client and for each login.

With `audit_statements`, the logger ``penstock.audit`` gets the role, the client's address, the kind
of statement, its objects, its outcome, how long it took, and its text with secrets blanked. A text
that cannot be parsed is omitted, because its secrets cannot be found. Each line is a JSON object,
so a client cannot inject a line of its own.
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
"""Maps commands to the kind that the log shows, where it differs from the command's words."""
_SHOWN_MAX: Final = 32
"""Maximum number of a statement's objects that a line names."""


class StatementAudit:
    """Writes the audit lines of one client."""

    def __init__(
        self, settings: Settings, role: str, peer: str, dialect: SqlDialect, user: str = ""
    ) -> None:
        """Start the audit of a client.

        Args:
            settings: The service's settings.
            role: The role that the client has authenticated as; "" if none.
            peer: The client's address.
            dialect: The dialect of the client's statements.
            user: The user name that the client gave.
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
        """Write a statement's line, with its outcome, when the block ends.

        Args:
            statement: The parsed statement; None if it is not in the service's grammar.
            text: The statement's text.
            known: Objects that a query may name, by name.
            kind: The kind to log if `statement` is None.
            failures_only: True if success is logged elsewhere, so that only a failure is logged
                here.
        """
        if not self.is_on:
            yield
            return
        began, outcome = anyio.current_time(), DONE
        try:
            yield
        except BaseException as error:
            # Log the class only: the message may contain values from the statement.
            outcome = type(error).__name__ if isinstance(error, Exception) else "canceled"
            raise
        finally:
            if outcome != DONE or not failures_only:
                # Built after the statement, which does not wait for it.
                name = kind if statement is None else kind_of(statement)
                shown = redact_text(text, self._dialect, statement)
                objects = objects_of_statement(statement, text, known or {})
                self._write(name, objects, outcome, anyio.current_time() - began, shown)

    def event(self, kind: str, outcome: str = DONE, objects: tuple[str, ...] = ()) -> None:
        """Write the line of an event without a text, such as a login."""
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
    """Return the kind of a statement, as the log shows it.

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
    """Return the names that a statement's own fields hold, then the known objects that its queries
    mention."""
    found: dict[str, None] = {}
    for name in _NAMES:
        value = getattr(statement, name, None)
        for each in value or () if name == "names" else (value,):
            if each:
                found[each if isinstance(each, str) else ".".join(each)] = None
    if statement is None or any(True for _ in parts_in(statement, TextSpan)):
        found |= dict.fromkeys(find_mentioned_tables(text, known))
    return tuple(found)

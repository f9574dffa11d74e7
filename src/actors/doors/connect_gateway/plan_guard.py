"""Checks the plans of clients without the right to run code, before Spark gets them.

`plan_rights.check_form` checks the form of a request when it arrives. This module checks what a
plan names: only objects of the service, temporary views of the session, and Spark functions without
effects outside a query. Spark itself parses SQL texts for this, without analyzing or running them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any, Final

from actors.control.access.access_rules import code_refusal
from actors.doors.connect_gateway.callers import caller
from actors.doors.connect_gateway.gateway_sessions import GatewaySession
from actors.doors.connect_gateway.object_catalog import ObjectNames
from actors.doors.connect_gateway.object_rows import run_job
from actors.doors.connect_gateway.plan_rewriting import (
    EXPRESSION_TEXT,
    TEXT_FIELDS,
    ProtoMessage,
    text_reads,
)
from actors.doors.connect_gateway.plan_rights import PlanUses, find_uses
from actors.doors.connect_gateway.sql_names import NameParts, is_plain_name, parse_identifier
from actors.model.plan.jobs import ParseText, StatementParsed
from actors.model.protocol.relations import fold
from actors.runtime.errors import AccessDenied, UnknownObject

_OWN_PLACES: Final[tuple[NameParts, ...]] = ((), ("default",), ("spark_catalog", "default"))
"""Qualifiers of names that the service resolves."""
PARSED_MAX: Final = 1_024
"""Maximum number of cached parse results."""
PARSED_CHARACTERS_MAX: Final = 4_096
"""Maximum length of a text whose parse result is cached."""


class PlanGuard:
    """Checks plans."""

    def __init__(self, executor: Any) -> None:
        """`executor` runs the Spark whose parser is used."""
        self._executor = executor
        self._numbers = itertools.count(1)
        # Cached parse results. They depend on nothing else, since `session_settings` fixes all
        # settings that affect the parser.
        self._parsed: OrderedDict[tuple[str, bool], StatementParsed] = OrderedDict()

    async def check(
        self, session: GatewaySession, message: ProtoMessage, names: ObjectNames
    ) -> None:
        """Raise `AccessDenied` if the caller may not have Spark execute or analyze this plan.

        Raises `UnknownObject` for a name that does not exist, and Spark's error for a text that
        does not parse.
        """
        who = caller()
        if who.runs_code:
            return
        known = _KnownNames(session, names, who.role)
        uses = find_uses(message)
        known.check(uses)
        for text, beside in uses.texts:
            await self._check_text(known, text, beside)

    async def _check_text(
        self, known: _KnownNames, message: ProtoMessage, beside: frozenset[str]
    ) -> None:
        kind = message.DESCRIPTOR.full_name
        text = str(getattr(message, TEXT_FIELDS[kind]))
        parsed = await self._parse(text, expression=kind == EXPRESSION_TEXT)
        refused = _refused(parsed)
        if refused:
            raise AccessDenied(code_refusal(known.role, refused))
        # These names will be found and replaced in the text later.
        found = {_folded(each.parts) for each in text_reads(message, ".".join)}
        for parts in parsed.relations:
            if len(parts) == 1 and parts[0].lower() in beside:
                continue
            known.check_read(parts)
            # A name that is not replaced would mean something else to Spark.
            if _folded(parts) not in found:
                raise AccessDenied(code_refusal(known.role, f"relation {'.'.join(parts)}"))

    async def _parse(self, text: str, *, expression: bool) -> StatementParsed:
        key = text, expression
        found = self._parsed.get(key)
        if found is not None:
            self._parsed.move_to_end(key)
            return found
        job = ParseText(f"connect/parse/{next(self._numbers)}", text, expression)
        answer = await run_job(self._executor, job)
        assert isinstance(answer, StatementParsed), answer
        if len(text) <= PARSED_CHARACTERS_MAX:
            self._parsed[key] = answer
            if len(self._parsed) > PARSED_MAX:
                self._parsed.popitem(last=False)
        return answer


def _refused(parsed: StatementParsed) -> str:
    """Return what is not permitted in a text; "" if everything is."""
    if parsed.command == "SetCommand":
        return "SET in a text: use spark.conf"
    if parsed.command:
        return f"statement {parsed.command}"
    if parsed.refused:
        return f"{parsed.kind} {parsed.refused}"
    if parsed.unknown:
        return f"function {parsed.unknown[0]}, which is not built into Spark"
    return ""


class _KnownNames:
    """Checks the names that a session may use."""

    def __init__(self, session: GatewaySession, names: ObjectNames, role: str) -> None:
        self._session = session
        self._names = names
        self.role = role

    def check(self, uses: PlanUses) -> None:
        """Raise `AccessDenied` or `UnknownObject` for a name that the session may not use."""
        for name in uses.reads:
            self.check_read(self._parts(name), name)
        for name in (*uses.streams, *uses.writes):
            parts = self._parts(name)
            if self._names.key_of(parts, self._session.hidden) is None:
                raise self._unusable(parts)
        for name in uses.questions:
            parts = self._parts(name)
            if not self._is_readable(parts, name) and _folded(parts[:-1]) not in _OWN_PLACES:
                raise self._unusable(parts)

    def check_read(self, parts: NameParts, written: str | None = None) -> None:
        """Raise `AccessDenied` or `UnknownObject` unless a name is that of an object or a temporary
        view. `written`: the name's text, if it is a field of a plan."""
        if not self._is_readable(parts, written):
            raise self._unusable(parts)

    def _is_readable(self, parts: NameParts, written: str | None) -> bool:
        session, names = self._session, self._names
        alone = fold(parts[0]) if len(parts) == 1 else ""
        if alone in session.views or names.plain_key_of(parts, session.hidden) is not None:
            return True
        if names.key_of(parts, session.hidden) is not None:
            return True
        # Spark resolves these names itself, so it must parse them in the same way.
        plain = is_plain_name(parts[0]) and written in (None, parts[0], f"`{parts[0]}`")
        return plain and len(parts) == 1 and alone in session.own_views

    def _parts(self, name: str) -> NameParts:
        parts = parse_identifier(name)
        if parts is None:
            raise AccessDenied(code_refusal(self.role, f"relation {name}"))
        return parts

    def _unusable(self, parts: NameParts) -> AccessDenied | UnknownObject:
        """Return the error for a name that does not exist, or that Spark would resolve."""
        shown = ".".join(parts)
        if _folded(parts[:-1]) in _OWN_PLACES:
            return UnknownObject(f"table or view {shown!r} does not exist")
        return AccessDenied(code_refusal(self.role, f"relation {shown}"))


def _folded(parts: NameParts) -> NameParts:
    return tuple(map(fold, parts))

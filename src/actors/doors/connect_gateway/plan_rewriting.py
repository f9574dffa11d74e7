"""Finding the objects that a Spark Connect plan names, and replacing them with relations. Pure.

A plan is traversed by the descriptors of its messages, so that no field is missed in any release.
Four kinds of fields name objects: reads of named tables, SQL texts, SQL expressions, and the
targets of writes.

- A read of a named table is replaced by its relation, under an alias of the same name, so that
  qualified columns still resolve.
- An SQL text becomes the root of a `WithRelations` message, with its relations as aliases. The text
  is not changed, except for names that have a database.
- An SQL expression cannot have relations. They are returned, and must be temporary views of the
  session while Spark analyzes the plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec
from pyspark.sql.connect.proto import base_pb2, relations_pb2

from actors.doors.connect_gateway.sql_names import (
    NameParts,
    ResolveName,
    TextRead,
    find_string_reads,
    find_text_reads,
    is_plain_name,
    parse_identifier,
    rename_chains,
)

ProtoMessage: TypeAlias = Any
"""A protobuf message. Its classes are created at runtime, and have no static types."""

PREFIX: Final = "spark.connect."
NAMED_TABLE: Final = f"{PREFIX}Read.NamedTable"
TEXT_FIELDS: Final[Mapping[str, str]] = {
    f"{PREFIX}SQL": "query",
    f"{PREFIX}SqlCommand": "sql",
    f"{PREFIX}Expression.ExpressionString": "expression",
    f"{PREFIX}PipelineCommand.DefineSqlGraphElements": "sql_text",
}
"""Fields that contain SQL, by message."""
EXPRESSION_TEXT: Final = f"{PREFIX}Expression.ExpressionString"
_NAMES_TABLES: Final = re.compile(r"\b(?:FROM|TABLE|IDENTIFIER|EXECUTE)\b", re.IGNORECASE)
READ_FIELDS: Final[Mapping[str, str]] = {
    NAMED_TABLE: "unparsed_identifier",
    f"{PREFIX}RelationChanges": "unparsed_identifier",
    f"{PREFIX}PipelineCommand.DefineFlow.AutoCdcFlowDetails": "source",
}
"""Fields that name a table to read, by message."""
WRITE_FIELDS: Final[Mapping[str, str]] = {
    f"{PREFIX}WriteOperation.SaveTable": "table_name",
    f"{PREFIX}WriteOperationV2": "table_name",
    f"{PREFIX}MergeIntoTableCommand": "target_table_name",
    f"{PREFIX}WriteStreamOperationStart": "table_name",
}
"""Fields that name a table to write, by message."""
UNBOUND: Final = frozenset(READ_FIELDS) - {NAMED_TABLE}
"""Messages that read the changes of a table, which cannot be replaced by rows at one timestamp."""
GENERATED: Final = "__penstock_"
"""Prefix of generated aliases, for names that are not valid aliases."""


class PlanNames(msgspec.Struct, frozen=True):
    """The objects that a plan names, by key."""

    read: Mapping[str, int]
    """Objects whose rows it reads, with the number of times it names each."""
    written: frozenset[str] = frozenset()
    """Objects that it writes."""
    followed: frozenset[str] = frozenset()
    """Objects whose changes it reads, as a batch or as a stream."""


class BoundPlan(msgspec.Struct, frozen=True):
    """A plan whose names have been replaced."""

    message: ProtoMessage
    """The new plan, or the message that contains it."""
    views: Mapping[str, ProtoMessage]
    """Relations, by name, that must be temporary views of the session while Spark analyzes it."""
    texts: bool = False
    """True if an SQL text in it has relations. Spark makes temporary views of them during the
    analysis."""


def walk_messages(message: ProtoMessage) -> Iterator[ProtoMessage]:
    """Yield a message and all messages nested in it, parents before children."""
    # An explicit stack: a plan may be nested more deeply than Python's recursion limit.
    left = [message]
    while left:
        found = left.pop()
        yield found
        left += children_of(found)


def children_of(message: ProtoMessage) -> list[ProtoMessage]:
    """Return the direct children of a message: in single fields, lists and maps."""
    found: list[ProtoMessage] = []
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if not _is_repeated(field):
            found.append(value)
        elif not field.message_type.GetOptions().map_entry:
            found += value
        # The values of a map may be messages; its keys cannot.
        elif field.message_type.fields_by_name["value"].message_type is not None:
            found += value.values()
    return found


def _is_repeated(field: ProtoMessage) -> bool:
    return bool(field.is_repeated)


# -- finding names ---------------------------------------------------------------------------------


def find_names(message: ProtoMessage, resolve: ResolveName) -> PlanNames:
    """Find the objects that a plan, or a part of one, names."""
    read: dict[str, int] = {}
    written: set[str] = set()
    followed: set[str] = set()
    for found in walk_messages(message):
        name = found.DESCRIPTOR.full_name
        if name in TEXT_FIELDS:
            for each in {each.key for each in text_reads(found, resolve)}:
                read[each] = read.get(each, 0) + 1
        elif name in READ_FIELDS or name in WRITE_FIELDS:
            key = _key_of(found, resolve)
            if key is None:
                continue
            if name in WRITE_FIELDS:
                written.add(key)
            elif name in UNBOUND:
                followed.add(key)
            else:
                read[key] = read.get(key, 0) + 1
        elif name == f"{PREFIX}Read" and found.is_streaming and found.HasField("named_table"):
            key = _key_of(found.named_table, resolve)
            followed |= set() if key is None else {key}
    return PlanNames(read, frozenset(written), frozenset(followed))


def _key_of(message: ProtoMessage, resolve: ResolveName) -> str | None:
    """Return the key of the object that a message's read or write field names."""
    name = message.DESCRIPTOR.full_name
    parts = parse_identifier(getattr(message, READ_FIELDS.get(name) or WRITE_FIELDS[name]))
    return None if parts is None else resolve(parts)


def text_reads(message: ProtoMessage, resolve: ResolveName) -> list[TextRead]:
    """Return the tables that a message's SQL text may read, including those in its arguments."""
    name = message.DESCRIPTOR.full_name
    text = getattr(message, TEXT_FIELDS[name])
    # A column may have the name of a table. Without one of these words the text names no table.
    if name == EXPRESSION_TEXT and _NAMES_TABLES.search(text) is None:
        return []
    found = dict.fromkeys(find_text_reads(text, resolve)) if text else {}
    # `IDENTIFIER(:name)` gets a name from an argument.
    if "identifier" in text.lower() or "execute" in text.lower():
        for argument in walk_messages(message):
            if argument.DESCRIPTOR.full_name == f"{PREFIX}Expression.Literal":
                for read in find_string_reads(argument.string, resolve):
                    found[read] = None
    return list(found)


# -- replacing names -------------------------------------------------------------------------------


def bind_names(
    message: ProtoMessage,
    resolve: ResolveName,
    relation_of: Callable[[str], ProtoMessage],
    qualifier_of: Callable[[str], NameParts] = lambda key: (),
) -> BoundPlan:
    """Copy a plan, or a message that contains plans, with names replaced by relations.

    Args:
        message: The plan or message.
        resolve: Returns the key of a named object.
        relation_of: Returns the relation of an object by its key.
        qualifier_of: Returns the catalog and database that may precede the object's name in the
            qualifier of a column.
    """
    bound = type(message)()
    bound.CopyFrom(message)
    binder = _NameBinder(resolve, relation_of, qualifier_of)
    binder.bind(bound)
    return BoundPlan(bound, binder.views, binder.texts)


class _NameBinder:
    """Replaces the names in a plan in place."""

    def __init__(
        self,
        resolve: ResolveName,
        relation_of: Callable[[str], ProtoMessage],
        qualifier_of: Callable[[str], NameParts],
    ) -> None:
        self._resolve = resolve
        self._relation_of = relation_of
        self._qualifier_of = qualifier_of
        self._generated: dict[str, str] = {}
        """Generated aliases by the key of the object."""
        self.views: dict[str, ProtoMessage] = {}
        """See `BoundPlan.views`."""
        self.texts = False
        """See `BoundPlan.texts`."""

    def bind(self, message: ProtoMessage) -> None:
        """Replace all names in a message."""
        ordered: list[ProtoMessage] = []
        # Object ids, which stay valid while `ordered` references the messages.
        texts: set[int] = set()
        left = [message]
        while left:
            found = left.pop()
            ordered.append(found)
            if found.DESCRIPTOR.full_name == f"{PREFIX}WithRelations" and binds_text(found):
                # Its relations are extended, because Spark would reject a nested `WithRelations`.
                texts.add(id(found))
                left += [*children_of(found.root.sql), *found.references]
            else:
                left += children_of(found)
        # Children first, so that a message is complete when its parent copies it.
        for found in reversed(ordered):
            match found.DESCRIPTOR.full_name.removeprefix(PREFIX):
                case "WithRelations" if id(found) in texts:
                    self._give_relations(found, found.root.sql)
                case "Relation" if found.WhichOneof("rel_type") == "sql":
                    self._wrap_text(found)
                case "Relation" if found.WhichOneof("rel_type") == "read":
                    self._replace_read(found)
                case "SqlCommand" if found.sql and not found.HasField("input"):
                    self._bind_command(found)
                case "Expression.ExpressionString":
                    self._bind_expression(found)

    def _replace_read(self, relation: ProtoMessage) -> None:
        """Replace a read of a named table with the object's relation under an alias."""
        read = relation.read
        if not read.HasField("named_table") or read.is_streaming:
            return
        parts = parse_identifier(read.named_table.unparsed_identifier)
        key = None if parts is None else self._resolve(parts)
        if parts is None or key is None:
            return
        _keep_common(relation)
        # As when Spark resolves a table, columns are qualified by catalog, database and name.
        alias = relation.subquery_alias
        alias.alias = parts[-1]
        alias.qualifier.extend(self._qualifier_of(key))
        alias.input.CopyFrom(self._relation_of(key))

    def _wrap_text(self, relation: ProtoMessage) -> None:
        """Wrap a text without relations in a `WithRelations`, if it needs any."""
        if not text_reads(relation.sql, self._resolve):
            return
        text = relations_pb2.SQL()
        text.CopyFrom(relation.sql)
        _keep_common(relation)
        relation.with_relations.root.sql.CopyFrom(text)
        self._give_relations(relation.with_relations, relation.with_relations.root.sql)

    def _give_relations(self, bound: ProtoMessage, sql: ProtoMessage) -> None:
        """Add the relations that a text needs to its `WithRelations`."""
        present = {each.subquery_alias.alias.lower() for each in bound.references}
        reads = [
            each
            for each in text_reads(sql, self._resolve)
            # A relation of this name that the client sent with the text has precedence.
            if len(each.parts) > 1 or each.parts[0].lower() not in present
        ]
        for alias, key in self._aliases(reads).items():
            self.texts = True
            if alias.lower() not in present:
                reference = bound.references.add().subquery_alias
                reference.alias = alias
                reference.input.CopyFrom(self._relation_of(key))
        sql.query = self._renamed(sql.query, reads)

    def _bind_command(self, command: ProtoMessage) -> None:
        """Convert a command from its older form, which cannot have relations, to the newer one."""
        if not text_reads(command, self._resolve):
            return
        command.input.sql.CopyFrom(text_of_command(command))
        for field in ("sql", "args", "pos_args", "named_arguments", "pos_arguments"):
            command.ClearField(field)
        self._wrap_text(command.input)

    def _bind_expression(self, written: ProtoMessage) -> None:
        # Spark parses an expression alone, so it cannot have a `WithRelations`.
        reads = text_reads(written, self._resolve)
        for alias, key in self._aliases(reads).items():
            self.views[alias] = self._relation_of(key)
        written.expression = self._renamed(written.expression, reads)

    # -- aliases -------------------------------------------------------------------------------

    def _aliases(self, reads: Iterable[TextRead]) -> dict[str, str]:
        """Map the aliases that a text will use to the keys of their objects."""
        return {self._alias(each): each.key for each in reads}

    def _alias(self, read: TextRead) -> str:
        name = read.parts[-1]
        # Spark makes a temporary view of this name. The name must be valid without quotes, and must
        # not replace a view that the client has created.
        if is_plain_name(name) and self._resolve((name,)) == read.key:
            return name.lower()
        made = self._generated.get(read.key)
        if made is None:
            made = self._generated[read.key] = f"{GENERATED}{len(self._generated)}"
        return made

    def _renamed(self, text: str, reads: Iterable[TextRead]) -> str:
        """Replace the names in a text that differ from their aliases."""
        renames: dict[NameParts, str] = {}
        for each in reads:
            folded, alias = tuple(part.lower() for part in each.parts), self._alias(each)
            if folded != (alias,) and not each.in_string:
                renames[folded] = alias
        return rename_chains(text, renames) if renames else text


def binds_text(bound: ProtoMessage) -> bool:
    """Return whether Spark treats a `WithRelations` as an SQL text with its own views."""
    if bound.root.WhichOneof("rel_type") != "sql" or not bound.references:
        return False
    return all(each.WhichOneof("rel_type") == "subquery_alias" for each in bound.references)


def _keep_common(relation: ProtoMessage) -> None:
    """Clear a relation, except for `common`: columns refer to it by its plan id."""
    kept = relations_pb2.RelationCommon()
    kept.CopyFrom(relation.common)
    had = relation.HasField("common")
    relation.Clear()
    if had:
        relation.common.CopyFrom(kept)


# -- commands that are texts -----------------------------------------------------------------------


def text_of_command(command: ProtoMessage) -> ProtoMessage:
    """Return the `SQL` message for a command in the older form, which contains the text itself."""
    text = relations_pb2.SQL(query=command.sql)
    for name, value in command.args.items():
        text.args[name].CopyFrom(value)
    for name, value in command.named_arguments.items():
        text.named_arguments[name].CopyFrom(value)
    text.pos_args.extend(command.pos_args)
    text.pos_arguments.extend(command.pos_arguments)
    return text


def relation_of_command(command: ProtoMessage) -> ProtoMessage:
    """Return the relation of the query in a `SqlCommand`. The Scala and JDBC clients send the text,
    the Python client sends this relation."""
    if command.HasField("input"):
        return command.input
    return relations_pb2.Relation(sql=text_of_command(command))


def written_text_of(relation: ProtoMessage) -> str | None:
    """Return the text of a relation that is an SQL text, with or without arguments and relations;
    None for all other relations."""
    if relation.WhichOneof("rel_type") == "with_relations":
        relation = relation.with_relations.root
    return str(relation.sql.query) if relation.WhichOneof("rel_type") == "sql" else None


def plain_text_of(relation: ProtoMessage) -> str | None:
    """Return the text of a relation that is an SQL text without arguments and relations; None for
    all other relations."""
    if relation.WhichOneof("rel_type") != "sql":
        return None
    sql = relation.sql
    if sql.args or sql.pos_args or sql.named_arguments or sql.pos_arguments:
        return None
    return str(sql.query)


def statement_of(plan: ProtoMessage) -> str | None:
    """Return the text of a plan that is an SQL statement without arguments; None for all other
    plans."""
    if plan.WhichOneof("op_type") != "command":
        return None
    if plan.command.WhichOneof("command_type") != "sql_command":
        return None
    return plain_text_of(relation_of_command(plan.command.sql_command))


def shown_plan(plan: ProtoMessage) -> str:
    """Return a readable description of a plan: its statement, or its kind."""
    text = statement_of(plan)
    if text is not None:
        return text
    kind = plan.root.WhichOneof("rel_type") or plan.command.WhichOneof("command_type") or "empty"
    return f"plan: {kind}"


def plan_of(relation: ProtoMessage) -> ProtoMessage:
    """Wrap a relation in a plan."""
    return base_pb2.Plan(root=relation)

"""Plans of Spark Connect: the objects that they name, and plans with relations in their place.

Pure. A plan is walked by the descriptors of its messages, so that no field is forgotten, whatever
release wrote it. Four kinds of fields name objects: tables that are read by name, SQL texts,
expressions that are written as SQL, and the targets of writes.

A read by name is replaced by its relation under an alias of the same name, so that columns keep
their qualifiers. To an SQL text the relations are given as Spark's own protocol has it: the text
is the root of `WithRelations`, each relation an alias beside it. The text stays as it is, but for
names with a database before them. An expression cannot have relations beside it; those that it
needs are returned, to be temporary views of the session while Spark analyses the plan.
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
"""A message of protobuf: its classes are made at run time, and have no types."""

PREFIX: Final = "spark.connect."
NAMED_TABLE: Final = f"{PREFIX}Read.NamedTable"
TEXT_FIELDS: Final[Mapping[str, str]] = {
    f"{PREFIX}SQL": "query",
    f"{PREFIX}SqlCommand": "sql",
    f"{PREFIX}Expression.ExpressionString": "expression",
    f"{PREFIX}PipelineCommand.DefineSqlGraphElements": "sql_text",
}
"""Fields that hold SQL, by the message that they are in."""
EXPRESSION_TEXT: Final = f"{PREFIX}Expression.ExpressionString"
_NAMES_TABLES: Final = re.compile(r"\b(?:FROM|TABLE|IDENTIFIER|EXECUTE)\b", re.IGNORECASE)
READ_FIELDS: Final[Mapping[str, str]] = {
    NAMED_TABLE: "unparsed_identifier",
    f"{PREFIX}RelationChanges": "unparsed_identifier",
    f"{PREFIX}PipelineCommand.DefineFlow.AutoCdcFlowDetails": "source",
}
"""Fields that name a table that is read."""
WRITE_FIELDS: Final[Mapping[str, str]] = {
    f"{PREFIX}WriteOperation.SaveTable": "table_name",
    f"{PREFIX}WriteOperationV2": "table_name",
    f"{PREFIX}MergeIntoTableCommand": "target_table_name",
    f"{PREFIX}WriteStreamOperationStart": "table_name",
}
"""Fields that name a table that is written."""
UNBOUND: Final = frozenset(READ_FIELDS) - {NAMED_TABLE}
"""Messages that read a table in a way that rows at one time cannot answer."""
GENERATED: Final = "__penstock_"
"""Prefix of aliases for names that cannot be aliases themselves."""


class PlanNames(msgspec.Struct, frozen=True):
    """Keys of the objects that a plan names."""

    read: Mapping[str, int]
    """Objects whose rows it reads, and how often it names each."""
    written: frozenset[str] = frozenset()
    followed: frozenset[str] = frozenset()
    """Objects whose changes it reads, once or as a stream."""


class BoundPlan(msgspec.Struct, frozen=True):
    """A plan whose names are replaced."""

    message: ProtoMessage
    views: Mapping[str, ProtoMessage]
    """Relations that it needs as temporary views of the session, by name, while Spark analyses
    it."""
    texts: bool = False
    """True if a text in it comes with relations, which Spark makes temporary views meanwhile."""


def walk_messages(message: ProtoMessage) -> Iterator[ProtoMessage]:
    """Yield a message and all messages in it, each before those in it."""
    # By a stack of our own: a plan may be nested more deeply than Python's calls.
    left = [message]
    while left:
        found = left.pop()
        yield found
        left += children_of(found)


def children_of(message: ProtoMessage) -> list[ProtoMessage]:
    """Return the messages in a message, of single fields, lists and maps."""
    found: list[ProtoMessage] = []
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if not _is_repeated(field):
            found.append(value)
        elif not field.message_type.GetOptions().map_entry:
            found += value
        # A map's values are messages or not; its keys never are.
        elif field.message_type.fields_by_name["value"].message_type is not None:
            found += value.values()
    return found


def _is_repeated(field: ProtoMessage) -> bool:
    return bool(field.is_repeated)


# -- finding names ---------------------------------------------------------------------------------


def find_names(message: ProtoMessage, resolve: ResolveName) -> PlanNames:
    """Return the objects that a plan, or a part of one, names."""
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
    """Return the key of the object that the message's one field names."""
    name = message.DESCRIPTOR.full_name
    parts = parse_identifier(getattr(message, READ_FIELDS.get(name) or WRITE_FIELDS[name]))
    return None if parts is None else resolve(parts)


def text_reads(message: ProtoMessage, resolve: ResolveName) -> list[TextRead]:
    """Return the tables that the text of a message may read, those in its arguments too."""
    name = message.DESCRIPTOR.full_name
    text = getattr(message, TEXT_FIELDS[name])
    # A column may be called like a table; without one of these words no table is named.
    if name == EXPRESSION_TEXT and _NAMES_TABLES.search(text) is None:
        return []
    found = dict.fromkeys(find_text_reads(text, resolve)) if text else {}
    # `IDENTIFIER(:name)` takes its name from an argument.
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
    """Return a copy of a plan, or of a message with plans in it, whose names are replaced.

    Args:
        relation_of: The relation of an object, by its key.
        qualifier_of: The catalog and database that a column's qualifier may name before the
            object's name.
    """
    bound = type(message)()
    bound.CopyFrom(message)
    binder = _NameBinder(resolve, relation_of, qualifier_of)
    binder.bind(bound)
    return BoundPlan(bound, binder.views, binder.texts)


class _NameBinder:
    """Replaces names in a plan, in place."""

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
        self.views: dict[str, ProtoMessage] = {}
        self.texts = False

    def bind(self, message: ProtoMessage) -> None:
        """Replace all names below a message."""
        ordered: list[ProtoMessage] = []
        # By identity, which lasts as long as `ordered` holds the messages.
        texts: set[int] = set()
        left = [message]
        while left:
            found = left.pop()
            ordered.append(found)
            if found.DESCRIPTOR.full_name == f"{PREFIX}WithRelations" and binds_text(found):
                # Its text is given more relations; a `WithRelations` of its own would not be taken.
                texts.add(id(found))
                left += [*children_of(found.root.sql), *found.references]
            else:
                left += children_of(found)
        # What is deeper first: a message that is copied by the one above it is complete then.
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
        """Replace a read by name with the object's relation under an alias."""
        read = relation.read
        if not read.HasField("named_table") or read.is_streaming:
            return
        parts = parse_identifier(read.named_table.unparsed_identifier)
        key = None if parts is None else self._resolve(parts)
        if parts is None or key is None:
            return
        _keep_common(relation)
        # As Spark resolves a table: its columns are qualified by catalog, database and name.
        alias = relation.subquery_alias
        alias.alias = parts[-1]
        alias.qualifier.extend(self._qualifier_of(key))
        alias.input.CopyFrom(self._relation_of(key))

    def _wrap_text(self, relation: ProtoMessage) -> None:
        """Put relations beside a text that has none."""
        if not text_reads(relation.sql, self._resolve):
            return
        text = relations_pb2.SQL()
        text.CopyFrom(relation.sql)
        _keep_common(relation)
        relation.with_relations.root.sql.CopyFrom(text)
        self._give_relations(relation.with_relations, relation.with_relations.root.sql)

    def _give_relations(self, bound: ProtoMessage, sql: ProtoMessage) -> None:
        """Add the relations that a text needs to those beside it."""
        present = {each.subquery_alias.alias.lower() for each in bound.references}
        reads = [
            each
            for each in text_reads(sql, self._resolve)
            # The user gave a relation of this name along with the text: it comes first.
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
        """Write a command of the older form, which cannot have relations, in the newer one."""
        if not text_reads(command, self._resolve):
            return
        command.input.sql.CopyFrom(text_of_command(command))
        for field in ("sql", "args", "pos_args", "named_arguments", "pos_arguments"):
            command.ClearField(field)
        self._wrap_text(command.input)

    def _bind_expression(self, written: ProtoMessage) -> None:
        # Spark parses the expression by itself, where nothing can stand beside it.
        reads = text_reads(written, self._resolve)
        for alias, key in self._aliases(reads).items():
            self.views[alias] = self._relation_of(key)
        written.expression = self._renamed(written.expression, reads)

    # -- aliases -------------------------------------------------------------------------------

    def _aliases(self, reads: Iterable[TextRead]) -> dict[str, str]:
        """Return the keys of the objects by the aliases under which a text will name them."""
        return {self._alias(each): each.key for each in reads}

    def _alias(self, read: TextRead) -> str:
        name = read.parts[-1]
        # Spark makes a temporary view of this name. It must be one that Spark takes without quotes,
        # and must not replace a view that the user has made.
        if is_plain_name(name) and self._resolve((name,)) == read.key:
            return name.lower()
        made = self._generated.get(read.key)
        if made is None:
            made = self._generated[read.key] = f"{GENERATED}{len(self._generated)}"
        return made

    def _renamed(self, text: str, reads: Iterable[TextRead]) -> str:
        """Return a text with the aliases of names that are not aliases themselves."""
        renames: dict[NameParts, str] = {}
        for each in reads:
            folded, alias = tuple(part.lower() for part in each.parts), self._alias(each)
            if folded != (alias,) and not each.in_string:
                renames[folded] = alias
        return rename_chains(text, renames) if renames else text


def binds_text(bound: ProtoMessage) -> bool:
    """Return whether Spark takes a `WithRelations` as a text with views of its own."""
    if bound.root.WhichOneof("rel_type") != "sql" or not bound.references:
        return False
    return all(each.WhichOneof("rel_type") == "subquery_alias" for each in bound.references)


def _keep_common(relation: ProtoMessage) -> None:
    """Clear a relation but for its metadata: columns name it by its plan id."""
    kept = relations_pb2.RelationCommon()
    kept.CopyFrom(relation.common)
    had = relation.HasField("common")
    relation.Clear()
    if had:
        relation.common.CopyFrom(kept)


# -- commands that are texts -----------------------------------------------------------------------


def text_of_command(command: ProtoMessage) -> ProtoMessage:
    """Return the `SQL` of a command of the older form, which has the text itself."""
    text = relations_pb2.SQL(query=command.sql)
    for name, value in command.args.items():
        text.args[name].CopyFrom(value)
    for name, value in command.named_arguments.items():
        text.named_arguments[name].CopyFrom(value)
    text.pos_args.extend(command.pos_args)
    text.pos_arguments.extend(command.pos_arguments)
    return text


def relation_of_command(command: ProtoMessage) -> ProtoMessage:
    """Return the relation that stands for the answer of a query in a `SqlCommand`: Scala's and
    JDBC's clients send the text, Python's sends this relation."""
    if command.HasField("input"):
        return command.input
    return relations_pb2.Relation(sql=text_of_command(command))


def written_text_of(relation: ProtoMessage) -> str | None:
    """Return the text of a relation that is an SQL text, with whatever arguments and relations;
    None for every other relation."""
    if relation.WhichOneof("rel_type") == "with_relations":
        relation = relation.with_relations.root
    return str(relation.sql.query) if relation.WhichOneof("rel_type") == "sql" else None


def plain_text_of(relation: ProtoMessage) -> str | None:
    """Return the text of a relation that is an SQL text without arguments and relations; None for
    every other relation."""
    if relation.WhichOneof("rel_type") != "sql":
        return None
    sql = relation.sql
    if sql.args or sql.pos_args or sql.named_arguments or sql.pos_arguments:
        return None
    return str(sql.query)


def statement_of(plan: ProtoMessage) -> str | None:
    """Return the text that a plan executes as a statement, without arguments; None for every other
    plan."""
    if plan.WhichOneof("op_type") != "command":
        return None
    if plan.command.WhichOneof("command_type") != "sql_command":
        return None
    return plain_text_of(relation_of_command(plan.command.sql_command))


def shown_plan(plan: ProtoMessage) -> str:
    """Return what a plan executes, for people: its statement, or what kind of plan it is."""
    text = statement_of(plan)
    if text is not None:
        return text
    kind = plan.root.WhichOneof("rel_type") or plan.command.WhichOneof("command_type") or "empty"
    return f"plan: {kind}"


def plan_of(relation: ProtoMessage) -> ProtoMessage:
    """Return a relation as a plan."""
    return base_pb2.Plan(root=relation)

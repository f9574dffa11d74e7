"""Plans for the tests of the gateway: with names planted at every place that can hold one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf import message_factory
from pyspark.sql.connect.proto import base_pb2, relations_pb2

from actors.doors.connect_gateway.plan_rewriting import TEXT_FIELDS, WRITE_FIELDS, children_of

ROOT = base_pb2.Plan.DESCRIPTOR
PREFIX = "spark.connect."
TEXTS = {
    f"{PREFIX}SQL": "SELECT * FROM {}",
    f"{PREFIX}SqlCommand": "SELECT * FROM {}",
    f"{PREFIX}Expression.ExpressionString": "a IN (SELECT a FROM {})",
    f"{PREFIX}PipelineCommand.DefineSqlGraphElements": "CREATE VIEW x AS SELECT * FROM {}",
}
READS = (f"{PREFIX}Read.NamedTable", *TEXTS)


class Planted(NamedTuple):
    """A plan with one name in it. `path`: the fields that lead there; `kind`: the message's."""

    plan: Any
    path: tuple[str, ...]
    kind: str


def message_of(field: Any) -> Any | None:
    """The descriptor of the messages in a field, of a map its values'; None if it has none."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        kind = kind.fields_by_name["value"].message_type
    return kind


def shortest_paths(start: Any) -> dict[str, tuple[Any, ...]]:
    """The fields that lead from a message to each message below it, as few as can be."""
    found: dict[str, tuple[Any, ...]] = {start.full_name: ()}
    left = deque([start])
    while left:
        kind = left.popleft()
        for field in kind.fields:
            below = message_of(field)
            if below is not None and below.full_name not in found:
                found[below.full_name] = (*found[kind.full_name], field)
                left.append(below)
    return found


def every_place(kinds: tuple[str, ...] = READS) -> Iterator[tuple[tuple[Any, ...], str]]:
    """A path for every field of every message below a plan that can lead to a message of these
    kinds: (fields, kind)."""
    reached = shortest_paths(ROOT)
    below: dict[str, dict[str, tuple[Any, ...]]] = {}
    pool = {ROOT.full_name: ROOT}
    for path in reached.values():
        for field in path:
            kind = message_of(field)
            assert kind is not None
            pool[kind.full_name] = kind
    for name, descriptor in pool.items():
        for field in descriptor.fields:
            kind = message_of(field)
            if kind is None:
                continue
            if kind.full_name not in below:
                below[kind.full_name] = shortest_paths(kind)
            for target in kinds:
                rest = below[kind.full_name].get(target)
                if rest is not None:
                    yield (*reached[name], field, *rest), target


def plant(path: tuple[Any, ...], kind: str, name: str) -> Planted:
    """A plan with a name at the end of these fields."""
    plan = base_pb2.Plan()
    message = plan
    for field in path:
        message = entered(message, field)
    write_name(message, name)
    return Planted(plan, tuple(field.name for field in path), kind)


def entered(message: Any, field: Any) -> Any:
    """A message in a field, made if the field is empty."""
    value = getattr(message, field.name)
    if field.message_type.GetOptions().map_entry:
        return value["key"]
    if field.is_repeated:
        return value[0] if len(value) else value.add()
    value.SetInParent()
    return value


def write_name(message: Any, name: str) -> None:
    """Let a message name a table."""
    kind = message.DESCRIPTOR.full_name
    if kind in TEXTS:
        setattr(message, TEXT_FIELDS[kind], TEXTS[kind].format(name))
    elif kind in WRITE_FIELDS:
        setattr(message, WRITE_FIELDS[kind], name)
    else:
        message.unparsed_identifier = name


def read(name: str, plan_id: int = 0) -> Any:
    """A read by name."""
    made = relations_pb2.Relation()
    made.common.plan_id = plan_id
    made.read.named_table.unparsed_identifier = name
    return made


def sql(text: str) -> Any:
    """A relation that is a text."""
    return relations_pb2.Relation(sql=relations_pb2.SQL(query=text))


def marker(key: str) -> Any:
    """A relation that stands for an object's rows in these tests."""
    made = relations_pb2.Relation()
    made.local_relation.schema = f"rows of {key}"
    return made


def markers(message: Any) -> list[str]:
    """The objects whose rows a plan has, once for each time."""
    found = []
    left = [message]
    while left:
        each = left.pop()
        if each.DESCRIPTOR.full_name == f"{PREFIX}LocalRelation":
            found.append(each.schema.removeprefix("rows of "))
        left += children_of(each)
    return sorted(found)


def resolve(parts: tuple[str, ...]) -> str | None:
    """The objects of these tests: o1 and o2, and one whose name needs quotes."""
    folded = tuple(part.lower() for part in parts)
    for key in ("o1", "o2", "odd name"):
        if folded in ((key,), ("default", key), ("spark_catalog", "default", key)):
            return key
    return None


def kind_of(descriptor: Any) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(descriptor)


def is_free(message: Any) -> bool:
    """Whether no name was planted in a message yet."""
    kind = message.DESCRIPTOR.full_name
    field = TEXT_FIELDS.get(kind) or WRITE_FIELDS.get(kind) or "unparsed_identifier"
    return not getattr(message, field)

"""What a request may have of a client that may not run code: each field, at whatever depth."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pyspark
import pytest
import zstandard
from google.protobuf import any_pb2, descriptor_pb2, message_factory
from hypothesis import given
from hypothesis import strategies as st
from plan_makers import entered, every_place, message_of, plant  # type: ignore[import-not-found]
from pyspark.sql.connect.proto import base_pb2, relations_pb2
from pyspark.sql.connect.proto import expressions_pb2 as ex

from actors.doors.connect_gateway.error_status import SparkCondition
from actors.doors.connect_gateway.plan_decoding import decode_request
from actors.doors.connect_gateway.plan_fields import PERMITTED_FIELDS, PREFIX, REFUSED_FIELDS
from actors.doors.connect_gateway.plan_rights import check_form, find_uses, names_class
from actors.engine.spark.spark_releases import NEWEST, pipeline_messages, release_of
from actors.runtime.errors import AccessDenied

UDT = '{"type": "udt", "class": "java.util.ArrayList", "sqlType": "string"}'
METHODS = base_pb2.DESCRIPTOR.services_by_name["SparkConnectService"].methods
FieldDescriptor = descriptor_pb2.FieldDescriptorProto


def refused(request: Any) -> str:
    """What is said of a request; empty if it is permitted."""
    try:
        check_form(request, "app")
    except AccessDenied as error:
        # All say what would give the right.
        return str(error) if str(error).endswith("GRANT EXECUTE CODE TO app") else "no grant"
    return ""


def permitted_messages() -> dict[str, Any]:
    """The descriptors of the messages that permitted fields lead to, from all methods."""
    found: dict[str, Any] = {}
    left = deque(method.input_type for method in METHODS)
    pipelines = pipeline_messages()
    if pipelines is not None:
        left.append(pipelines.PipelineAnalysisContext.DESCRIPTOR)
    while left:
        kind = left.popleft()
        if kind.full_name in found or kind.full_name == "google.protobuf.Any":
            continue
        found[kind.full_name] = kind
        permitted = PERMITTED_FIELDS.get(kind.full_name, frozenset())
        below = (message_of(field) for field in kind.fields if field.name in permitted)
        left.extend(each for each in below if each is not None)
    return found


# -- the lists -------------------------------------------------------------------------------------


def test_each_field_of_this_release_is_permitted_or_refused() -> None:
    unknown: list[str] = []
    both: list[str] = []
    for name, kind in permitted_messages().items():
        permitted, refused_ = PERMITTED_FIELDS.get(name), REFUSED_FIELDS.get(name)
        if permitted is None:
            # Refused as a whole, and said to be so.
            assert refused_ == frozenset(), name
            continue
        for field in kind.fields:
            places = (field.name in permitted) + (field.name in (refused_ or ()))
            if places != 1:
                (both if places else unknown).append(f"{name}.{field.name}")
    assert (unknown, both) == ([], [])


def test_the_lists_have_nothing_that_the_newest_release_has_not() -> None:
    if release_of(pyspark.__version__) != NEWEST:
        assert release_of(pyspark.__version__) < NEWEST
        return
    known = permitted_messages()
    for listed in (PERMITTED_FIELDS, REFUSED_FIELDS):
        for name, fields in listed.items():
            assert fields <= {field.name for field in known[name].fields}, name


# -- drawn plans -----------------------------------------------------------------------------------

ROOT = f"{PREFIX}Plan"
KINDS = permitted_messages()


def edges(kind: Any) -> list[tuple[Any, Any]]:
    """(field, its message) of all permitted fields with messages that have some fields."""
    permitted = PERMITTED_FIELDS.get(kind.full_name, frozenset())
    pairs = [(field, message_of(field)) for field in kind.fields if field.name in permitted]
    return [(field, below) for field, below in pairs if below is not None
            and below.full_name in PERMITTED_FIELDS]  # fmt: skip


@cache
def distances(target: str) -> dict[str, int]:
    """How many fields lead from each message to one, at least."""
    above: dict[str, set[str]] = {}
    for name, kind in KINDS.items():
        for _, below in edges(kind):
            above.setdefault(below.full_name, set()).add(name)
    found, left = {target: 0}, deque([target])
    while left:
        name = left.popleft()
        for each in above.get(name, ()):
            if each not in found:
                found[each] = found[name] + 1
                left.append(each)
    return found


def forbidden() -> Iterator[tuple[str, str]]:
    """(message, field) of all refused fields that a plan can lead to."""
    for name, fields in REFUSED_FIELDS.items():
        for field in sorted(fields):
            if name in KINDS and ROOT in distances(name):
                yield name, field


FORBIDDEN = sorted(forbidden())
IN_PLANS = sorted(name for name in KINDS if ROOT in distances(name) and name in PERMITTED_FIELDS)


def settle(message: Any) -> None:
    """Give a message the values without which it is refused, or means nothing."""
    match message.DESCRIPTOR.full_name.removeprefix(PREFIX):
        case "Expression.UnresolvedFunction":
            message.function_name = "upper"
        case "UnresolvedTableValuedFunction":
            message.function_name = "explode"
        case "Parse":
            message.format = relations_pb2.Parse.PARSE_FORMAT_JSON
        case "CheckpointCommand":
            message.local = True
        case "WriteStreamOperationStart":
            message.format = "noop"


def drawn_carrier(draw: st.DataObject, target: str) -> tuple[Any, Any]:
    """A plan with a message of this kind somewhere in it: (plan, message)."""
    near = distances(target)
    plan = message = base_pb2.Plan()
    wander = draw.draw(st.integers(0, 12), label="depth")
    while True:
        kind = message.DESCRIPTOR
        ways = [(field, below) for field, below in edges(kind) if below.full_name in near]
        if wander > 0 and ways:
            wander -= 1
        elif kind.full_name == target:
            return plan, message
        else:
            ways = [way for way in ways if near[way[1].full_name] < near[kind.full_name]]
        field, _ = draw.draw(st.sampled_from(ways), label="field")
        message = entered(message, field)
        settle(message)


def set_field(message: Any, name: str) -> None:
    """Give a field some value that is none of nothing."""
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.message_type is None:
        value = {field.CPPTYPE_STRING: "x", field.CPPTYPE_BOOL: True}.get(field.cpp_type, 1)
        if field.type == field.TYPE_BYTES:
            value = b"x"
        if field.is_repeated:
            getattr(message, name).append(value)
        else:
            setattr(message, name, value)
    elif field.message_type.GetOptions().map_entry:
        value_field = field.message_type.fields_by_name["value"]
        if value_field.message_type is None:
            getattr(message, name)["k"] = "v"
        else:
            getattr(message, name)["k"].SetInParent()
    elif field.is_repeated:
        getattr(message, name).add()
    else:
        getattr(message, name).SetInParent()


def packed(plan: Any) -> Any:
    """The same plan as a client sends it that compresses large ones."""
    kinds = base_pb2.Plan.CompressedOperation
    root = plan.HasField("root")
    part = plan.root if root else plan.command
    made = base_pb2.Plan()
    made.compressed_operation.data = zstandard.compress(part.SerializeToString())
    made.compressed_operation.op_type = kinds.OP_TYPE_RELATION if root else kinds.OP_TYPE_COMMAND
    made.compressed_operation.compression_codec = base_pb2.COMPRESSION_CODEC_ZSTD
    return made


def received(plan: Any, how: str) -> Any:
    """The request that the gateway has of a plan, which came in some way."""
    request = base_pb2.ExecutePlanRequest(session_id="s")
    request.plan.CopyFrom(packed(plan) if how == "compressed" else plan)
    return decode_request(base_pb2.ExecutePlanRequest, request.SerializeToString(), 1 << 20)


@given(st.data(), st.sampled_from(["plain", "compressed"]))
def test_a_forbidden_piece_is_refused_at_any_depth(draw: st.DataObject, how: str) -> None:
    target, field = draw.draw(st.sampled_from(FORBIDDEN), label="forbidden")
    plan, message = drawn_carrier(draw, target)
    if target == ROOT or message is plan:
        how = "plain"
    assert refused(received(plan, how)) == ""
    set_field(message, field)
    if field == "compressed_operation":
        # It is decompressed first, and this one holds nothing.
        with pytest.raises(SparkCondition, match="CANNOT_PARSE"):
            received(plan, how)
    else:
        assert field in refused(received(plan, how))


@given(st.data())
def test_a_field_that_nobody_knows_is_refused_at_any_depth(draw: st.DataObject) -> None:
    target = draw.draw(st.sampled_from(IN_PLANS))
    plan, message = drawn_carrier(draw, target)
    assert refused(plan) == ""
    # Field 900 of wire type 2, as a later release may have it.
    message.MergeFromString(b"\xa2\x38\x01x")
    assert "unknown field" in refused(received(plan, "plain"))


def test_each_refused_field_is_refused() -> None:
    tried = 0
    for name, fields in REFUSED_FIELDS.items():
        for field in fields & {each.name for each in KINDS[name].fields}:
            message = message_factory.GetMessageClass(KINDS[name])()
            settle(message)
            assert refused(message) == ""
            set_field(message, field)
            assert field in refused(message), (name, field)
            tried += 1
    assert tried > 50


def test_a_refused_switch_that_is_off_is_none() -> None:
    call = ex.Expression.UnresolvedFunction(function_name="upper", is_internal=False)
    assert refused(call) == ""
    call.is_internal = True
    assert "is_internal" in refused(call)


# -- values ----------------------------------------------------------------------------------------


def call(name: str, *arguments: Any) -> Any:
    made = ex.Expression()
    made.unresolved_function.function_name = name
    made.unresolved_function.arguments.extend(arguments)
    return made


def text(value: str) -> Any:
    return ex.Expression(literal=ex.Expression.Literal(string=value))


def text_map(*keys: str) -> Any:
    made = ex.Expression()
    for each in keys:
        made.literal.map.keys.add(string=each)
        made.literal.map.values.add(string="v")
    return made


def column(name: str) -> Any:
    made = ex.Expression()
    made.unresolved_attribute.unparsed_identifier = name
    return made


def parse(number: Any, **options: str) -> Any:
    return relations_pb2.Parse(format=number, options=options)


def of_commands(kind: str, **fields: Any) -> Any:
    return getattr(base_pb2.Plan().command, kind).__class__(**fields)


XML = relations_pb2.Parse.PARSE_FORMAT_UNSPECIFIED + 3
VALUES = [
    (call("UPPER"), ""),
    (call("java_method"), "function java_method"),
    (call("Reflect"), "function Reflect"),
    (call("input_file_name"), "function input_file_name"),
    (call("nobody_knows"), "function nobody_knows"),
    (call("a.upper"), "function a.upper"),
    (call("product"), ""),
    (relations_pb2.UnresolvedTableValuedFunction(function_name="range"), ""),
    (
        relations_pb2.UnresolvedTableValuedFunction(function_name="python_worker_logs"),
        "function python_worker_logs",
    ),
    (call("from_json", column("a"), text("a INT")), ""),
    (call("from_json", column("a"), text(UDT)), "names a class"),
    (call("from_json", text("{"), text("a INT")), ""),
    (call("from_csv", column("a"), text("{")), "names a class"),
    (call("from_xml", column("a"), text("a INT"), text_map("mode")), ""),
    (call("from_xml", column("a"), text("a INT"), text_map("rowValidationXSDPath")), "option"),
    (
        call("from_xml", column("a"), text("a INT"), call("map", text("RowValidationXsdPath"))),
        "option",
    ),
    (call("from_xml", column("a"), call("schema_of_xml", text("<a/>"))), ""),
    (call("schema_of_xml", text("<a/>"), column("b")), "XML options"),
    (relations_pb2.LocalRelation(schema="a INT"), ""),
    (relations_pb2.LocalRelation(schema='{"type":"struct","fields":[]}'), ""),
    (relations_pb2.LocalRelation(schema=UDT), "names a class"),
    (base_pb2.AnalyzePlanRequest.JsonToDDL(json_string=UDT), "names a class"),
    (parse(relations_pb2.Parse.PARSE_FORMAT_CSV, header="true"), ""),
    (parse(relations_pb2.Parse.PARSE_FORMAT_CSV, RowValidationXSDPath="f"), "option"),
    (parse(relations_pb2.Parse.PARSE_FORMAT_UNSPECIFIED), "format 0"),
    (parse(99), "format 99"),
    (of_commands("checkpoint_command", local=True), ""),
    (of_commands("checkpoint_command", eager=True), "a checkpoint in files"),
    *(
        (of_commands("write_stream_operation_start", format=each), wanted)
        for each, wanted in (
            ("memory", ""),
            ("noop", ""),
            ("", "a stream into files"),
            ("console", "a stream into console"),
            ("parquet", "a stream into parquet"),
            ("org.example.Sink", "a stream into org.example.Sink"),
        )
    ),
]


@pytest.mark.parametrize(("message", "wanted"), VALUES)
def test_values_of_permitted_fields(message: Any, wanted: str) -> None:
    found = refused(message)
    assert wanted in found if wanted else found == ""


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ("a INT", False),
        ("class STRING, udt INT", False),
        ('{"type": "struct", "fields": [{"name": "udt", "type": "string"}]}', False),
        (f' {{"type": "array", "elementType": {UDT}}} trailing', True),
        # Of two equal keys a reader may take either one.
        ('{"type": "udt", "type": "struct", "fields": []}', True),
        ('{"type": "struct", "pyClass": "a.b"}', True),
        ('{"type": ', True),
        ("[" * 100_000, True),
    ],
)
def test_schemas_that_name_a_class(schema: str, wanted: bool) -> None:
    assert names_class(schema) == wanted


def test_of_extensions_a_pipelines_context_is_permitted_alone() -> None:
    request = base_pb2.ExecutePlanRequest()
    request.user_context.extensions.add().Pack(descriptor_pb2.FieldDescriptorProto(name="x"))
    assert "extension google.protobuf.FieldDescriptorProto" in refused(request)
    pipelines = pipeline_messages()
    context = base_pb2.ExecutePlanRequest()
    if pipelines is None:
        context.user_context.extensions.add(type_url="x/spark.connect.PipelineAnalysisContext")
        assert "extension" in refused(context)
        return
    made = pipelines.PipelineAnalysisContext(dataflow_graph_id="g")
    context.user_context.extensions.add().Pack(made)
    assert refused(context) == ""
    made.extension.add().CopyFrom(any_pb2.Any(type_url="x/y"))
    context.user_context.extensions[0].Pack(made)
    assert "PipelineAnalysisContext.extension" in refused(context)
    context.user_context.extensions[0].value = b"\xff"
    assert "malformed extension" in refused(context)


@pytest.mark.parametrize(
    "request_",
    [
        base_pb2.AddArtifactsRequest(session_id="s"),
        base_pb2.ArtifactStatusesRequest(names=["a"]),
        # A message of a method that nobody has looked at.
        descriptor_pb2.FieldDescriptorProto(),
    ],
)
def test_whole_requests_are_refused(request_: Any) -> None:
    assert request_.DESCRIPTOR.full_name.removeprefix(PREFIX) in refused(request_)


# -- uses ------------------------------------------------------------------------------------------


def test_names_and_texts_are_found_at_every_place() -> None:
    places = 0
    for path, kind in every_place():
        planted = plant(path, kind, "o1")
        for message in (planted.plan, planted.plan.root, planted.plan.command):
            assert message is not None
        uses = find_uses(planted.plan)
        found = [*uses.reads, *uses.streams]
        for each, _ in uses.texts:
            found += [value for _, value in each.ListFields() if isinstance(value, str)]
        assert any("o1" in each for each in found), planted.path
        places += 1
    assert places > 100


def test_what_names_are_used_for() -> None:
    plan = base_pb2.Plan()
    plan.command.write_operation.table.table_name = "w"
    plan.command.write_operation.input.read.named_table.unparsed_identifier = "r"
    uses = find_uses(plan)
    assert (uses.writes, uses.reads) == (("w",), ("r",))
    asked = relations_pb2.Relation()
    asked.catalog.get_table.table_name, asked.catalog.get_table.db_name = "t", "d"
    assert find_uses(asked).questions == ("d.t",)
    asked.catalog.cache_table.table_name = "c"
    assert find_uses(asked).reads == ("c",)
    asked.read.is_streaming = True
    asked.read.named_table.unparsed_identifier = "s"
    assert find_uses(asked).streams == ("s",)
    asked.relation_changes.unparsed_identifier = "f"
    assert find_uses(asked) == msgspec.structs.replace(find_uses(asked), streams=("f",))


def test_relations_beside_a_text_are_known_where_spark_makes_views_of_them() -> None:
    relation = relations_pb2.Relation()
    relation.with_relations.root.sql.query = "SELECT * FROM A"
    beside = relation.with_relations.references.add()
    beside.subquery_alias.alias = "A"
    ((_, known),) = find_uses(relation).texts
    assert known == {"a"}
    # With another one beside it Spark makes views of none.
    relation.with_relations.references.add().range.end = 1
    ((_, known),) = find_uses(relation).texts
    assert known == frozenset()

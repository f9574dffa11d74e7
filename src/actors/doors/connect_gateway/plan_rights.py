"""Checks of requests from clients that may not run their own code. Pure.

A request is checked before any of it is sent to Spark. First its form (`check_form`): only the
fields in `plan_fields` may be set, and no fields that this release does not know. Then its uses
(`find_uses`): the relations that it names, and its SQL texts, which Spark's parser analyzes
(`text_rights`).

Rejected requests raise `AccessDenied`, whose message names the missing right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from pyspark.sql.connect.proto import relations_pb2

from actors.control.access.access_rules import code_refusal
from actors.doors.connect_gateway.plan_fields import PERMITTED_FIELDS, PREFIX
from actors.doors.connect_gateway.plan_rewriting import (
    TEXT_FIELDS,
    ProtoMessage,
    binds_text,
    walk_messages,
)
from actors.engine.catalyst.permitted_functions import (
    REFUSED_OPTIONS,
    is_permitted_function,
    is_permitted_table_function,
)
from actors.engine.spark.spark_releases import pipeline_messages
from actors.runtime.errors import AccessDenied

_PIPELINES: Final = pipeline_messages()
_STREAM_SINKS: Final = frozenset({"memory", "noop"})
"""Sinks that store rows in the session, or not at all."""
_PARSED_FORMATS: Final = frozenset(
    getattr(relations_pb2.Parse, f"PARSE_FORMAT_{name}")
    for name in ("CSV", "JSON", "XML")
    if f"PARSE_FORMAT_{name}" in relations_pb2.Parse.ParseFormat.keys()  # noqa: SIM118
)
_PLANNED_FUNCTIONS: Final = frozenset({"product", "timestampadd", "timestampdiff"})
"""Functions that Spark's server handles itself, and that have no name in SQL."""
_WRITES: Final = frozenset({"WriteOperation.SaveTable", "WriteOperationV2"})
_ASKED_OF_CATALOG: Final = frozenset({"TableExists", "GetTable", "ListColumns", "IsCached"})
"""Questions about one relation, which is in Spark's own database or does not exist."""
_KEPT_IN_CATALOG: Final = frozenset(
    {"CacheTable", "UncacheTable", "RefreshTable", "GetTableProperties", "GetCreateTableString"}
)
"""Requests about one relation that the client must be able to read."""


class PlanUses(msgspec.Struct, frozen=True):
    """The names and texts of a request."""

    reads: tuple[str, ...] = ()
    """Names of relations that it reads, as written."""
    streams: tuple[str, ...] = ()
    """Names of relations whose changes it reads."""
    writes: tuple[str, ...] = ()
    """Names of tables that it writes."""
    questions: tuple[str, ...] = ()
    """Names that it asks the catalog about."""
    texts: tuple[tuple[ProtoMessage, frozenset[str]], ...] = ()
    """Messages with an SQL text, each with the names, in lower case, of its own relations."""


def check_form(request: ProtoMessage, role: str) -> None:
    """Raise `AccessDenied` if a request contains something that requires the right to run code."""
    # Every message is checked, at any depth.
    for message in walk_messages(request):
        what = _refused_field(message) or _refused_value(message)
        if what:
            raise AccessDenied(code_refusal(role, what))


def find_uses(request: ProtoMessage) -> PlanUses:
    """Find the names and texts of a request that `check_form` has accepted."""
    found: dict[str, list[Any]] = {name: [] for name in PlanUses.__struct_fields__}
    beside: dict[int, frozenset[str]] = {}
    messages = list(walk_messages(request))
    for message in messages:
        if message.DESCRIPTOR.full_name == f"{PREFIX}WithRelations" and binds_text(message):
            aliases = (each.subquery_alias.alias.lower() for each in message.references)
            beside[id(message.root.sql)] = frozenset(aliases)
    for message in messages:
        kind = _short(message)
        if kind == "Read" and message.HasField("named_table"):
            field = "streams" if message.is_streaming else "reads"
            found[field].append(message.named_table.unparsed_identifier)
        elif kind == "RelationChanges":
            found["streams"].append(message.unparsed_identifier)
        elif kind in _WRITES:
            found["writes"].append(message.table_name)
        elif kind in _KEPT_IN_CATALOG:
            found["reads"].append(message.table_name)
        elif kind in _ASKED_OF_CATALOG:
            found["questions"].append(_asked(message))
        elif PREFIX + kind in TEXT_FIELDS and getattr(message, TEXT_FIELDS[PREFIX + kind]):
            found["texts"].append((message, beside.get(id(message), frozenset())))
    return PlanUses(**{name: tuple(each) for name, each in found.items()})


def _asked(question: ProtoMessage) -> str:
    # The older form has the database in a separate field.
    fields = question.DESCRIPTOR.fields_by_name
    apart = "db_name" in fields and question.HasField("db_name")
    return f"{question.db_name}.{question.table_name}" if apart else str(question.table_name)


# -- form ------------------------------------------------------------------------------------------


def _short(message: ProtoMessage) -> str:
    return str(message.DESCRIPTOR.full_name).removeprefix(PREFIX)


def _refused_field(message: ProtoMessage) -> str:
    """Return a field of a message that is not permitted; "" if there is none."""
    kind = _short(message)
    permitted = PERMITTED_FIELDS.get(PREFIX + kind)
    if kind == "google.protobuf.Any":
        return _refused_extension(message)
    if permitted is None:
        return kind
    # Unknown fields have no effect here, but may have one at the server.
    if len(UnknownFieldSet(message)):
        return f"an unknown field of {kind}"
    for field, value in message.ListFields():
        # A switch that is off equals one that is absent.
        if field.name not in permitted and value is not False:
            return f"{kind}.{field.name}"
    return ""


def _refused_extension(packed: ProtoMessage) -> str:
    """Return the reason why an extension is not permitted; "" if it is. The only permitted
    extension is the context of a pipeline's code."""
    kind = packed.type_url.rpartition("/")[2]
    if _PIPELINES is None or kind != _PIPELINES.PipelineAnalysisContext.DESCRIPTOR.full_name:
        return f"extension {kind}"
    try:
        context = _PIPELINES.PipelineAnalysisContext.FromString(packed.value)
    except DecodeError:
        return f"malformed extension {kind}"
    return next(filter(None, map(_refused_field, walk_messages(context))), "")


def _refused_value(message: ProtoMessage) -> str:
    """Return a value in a permitted field that is not permitted there; "" if there is none."""
    match _short(message):
        case "Expression.UnresolvedFunction":
            return _refused_call(message)
        case "UnresolvedTableValuedFunction":
            name = message.function_name
            return "" if is_permitted_table_function(name) else f"function {name}"
        case "LocalRelation" if names_class(message.schema):
            return "a schema that names a class"
        case "AnalyzePlanRequest.JsonToDDL" if names_class(message.json_string):
            return "a schema that names a class"
        case "Parse" if message.format not in _PARSED_FORMATS:
            return f"format {message.format}"
        case "Parse":
            return _refused_options(message.options)
        # Spark stores a local checkpoint with its cached rows.
        case "CheckpointCommand" if not message.local:
            return "a checkpoint in files"
        case "WriteStreamOperationStart" if message.format not in _STREAM_SINKS:
            return f"a stream into {message.format or 'files'}"
    return ""


def _refused_call(call: ProtoMessage) -> str:
    name = call.function_name
    if name.lower() not in _PLANNED_FUNCTIONS and not is_permitted_function(name):
        return f"function {name}"
    folded, others = name.lower(), call.arguments[1:]
    # Spark also accepts the schemas of these functions as JSON.
    if folded.startswith("from_"):
        for each in others:
            literal = each.WhichOneof("expr_type") == "literal"
            if literal and names_class(each.literal.string):
                return "a schema that names a class"
    # Options of these may name a file, which would be opened when the plan is analyzed.
    if folded.endswith("_xml"):
        return next(filter(None, map(_refused_xml_argument, others)), "")
    return ""


def _refused_xml_argument(argument: ProtoMessage) -> str:
    """Return the reason why an argument of an XML function, after the first one, is not permitted;
    "" if it is. It may contain options of the reader."""
    if argument.WhichOneof("expr_type") == "literal":
        return _refused_options(dict.fromkeys(each.string for each in argument.literal.map.keys))
    call = argument.unresolved_function
    name = call.function_name.lower()
    if name.startswith("schema_of_"):
        return ""
    if name == "map" and all(each.HasField("literal") for each in call.arguments):
        return _refused_options(dict.fromkeys(each.literal.string for each in call.arguments))
    return "XML options other than a map of string literals"


def _refused_options(options: Mapping[str, Any]) -> str:
    return next((f"option {each}" for each in options if each.lower() in REFUSED_OPTIONS), "")


def names_class(schema: str) -> bool:
    """Return whether a schema names a class, which Spark would load and instantiate.

    Only JSON schemas can. A schema that looks like JSON but is malformed counts as well.

    >>> names_class("a INT, b STRING"), names_class('{"type": "udt", "class": "a.B"}')
    (False, True)
    """
    # This strips at least what Spark strips, so any text that is JSON to Spark begins like JSON.
    text = schema.strip()
    if text[:1] not in {"{", "[", '"'}:
        return False
    found = False

    def look(pairs: list[tuple[str, Any]]) -> None:
        # Look at pairs: of two equal keys, Spark may use the other one.
        nonlocal found
        found = found or any(
            key in ("class", "pyClass") or (key == "type" and value == "udt")
            for key, value in pairs
        )

    try:
        # Ignore anything after the first value, as Spark does.
        json.JSONDecoder(object_pairs_hook=look, strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return True
    return found

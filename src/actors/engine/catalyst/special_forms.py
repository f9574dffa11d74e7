"""Writes expressions that are not plain calls: SQL's own forms, lambdas, fields and options.

Each function takes the writer and a node; `SPECIAL_FORMS` maps classes to them. The forms of
aggregates and windows are in `aggregate_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from actors.engine.catalyst.function_calls import ExpressionText, check_mode, check_settings
from actors.engine.catalyst.literals import NotRendered, string_text, type_text
from actors.engine.catalyst.plan_tree import TreeNode
from actors.model.plan.schema import quote

SpecialForm = Callable[[ExpressionText, TreeNode], str]
_BACKSLASH: Final = "\\"


def type_of(node: TreeNode) -> Any:
    """Return the type of an expression as Spark's JSON; None if it is not resolved."""
    found = node.fields.get("type")
    return node.fields.get("dataType") if found is None else found


def _child(writer: ExpressionText, node: TreeNode) -> str:
    return writer.write(node.children[0])


def _cast(writer: ExpressionText, node: TreeNode) -> str:
    child = node.children[0]
    added = child.name in ("TimestampAddInterval", "DatetimeSub")
    if added and type_of(child) == node.fields["dataType"]:
        # Spark itself adds such a cast to a sum when it analyses the text.
        left, right = (writer.write(side) for side in _sides(child))
        return f"({left} {'+' if child.name == 'TimestampAddInterval' else '-'} {right})"
    function = "CAST"
    if node.fields.get("evalMode") == "TRY":
        function = "TRY_CAST"
    else:
        check_mode(node, ansi=writer.ansi)
    target = type_text(node.fields["dataType"])
    return f"{function}({writer.write(child)} AS {target})"


def _sides(node: TreeNode) -> tuple[TreeNode, TreeNode]:
    """Return a timestamp and the interval that is added to or subtracted from it."""
    if node.fields.get("stale"):
        made = node.children[0]
        # Spark replaces a subtraction by the addition of the negated interval.
        if made.name != "TimestampAddInterval" or made.children[1].name != "UnaryMinus":
            raise NotRendered("a subtraction with an unexpected replacement")
        return made.children[0], made.children[1].children[0]
    return node.children[0], node.children[1]


def _timestamp_sum(writer: ExpressionText, node: TreeNode) -> str:
    """Write a sum without Spark's cast: an interval of days or less that is added to a date."""
    start, interval = node.children
    # Spark casts the date when it analyses the text.
    if start.name == "Cast" and type_of(start.children[0]) == "date":
        start = start.children[0]
    return f"({writer.write(start)} + {writer.write(interval)})"


def _case(writer: ExpressionText, node: TreeNode) -> str:
    parts = [writer.write(child) for child in node.children]
    branches = "".join(
        f" WHEN {parts[at]} THEN {parts[at + 1]}" for at in range(0, len(parts) - 1, 2)
    )
    otherwise = f" ELSE {parts[-1]}" if len(parts) % 2 else ""
    return f"CASE{branches}{otherwise} END"


def _in(writer: ExpressionText, node: TreeNode) -> str:
    if len(node.children) < 2:
        raise NotRendered("IN of an empty list")
    return f"({writer.write(node.children[0])} IN ({writer.many(node.children[1:])}))"


def _between(writer: ExpressionText, node: TreeNode) -> str:
    value, low, high = (writer.write(child) for child in node.children)
    return f"({value} BETWEEN {low} AND {high})"


def _like(word: str) -> SpecialForm:
    def write(writer: ExpressionText, node: TreeNode) -> str:
        value, pattern = (writer.write(child) for child in node.children)
        escape = node.fields["escapeChar"]
        behind = ""
        if escape != _BACKSLASH:
            behind = f" ESCAPE {string_text(escape, raw=writer.raw_strings)}"
        return f"({value} {word} {pattern}{behind})"

    return write


def _like_several(words: str) -> SpecialForm:
    def write(writer: ExpressionText, node: TreeNode) -> str:
        patterns = (
            "NULL" if pattern is None else string_text(pattern, raw=writer.raw_strings)
            for pattern in node.fields["patterns"]
        )
        return f"({writer.write(node.children[0])} {words} ({', '.join(patterns)}))"

    return write


def _trim(side: str) -> SpecialForm:
    def write(writer: ExpressionText, node: TreeNode) -> str:
        value, *characters = (writer.write(child) for child in node.children)
        trimmed = f"{characters[0]} " if characters else ""
        return f"TRIM({side} {trimmed}FROM {value})"

    return write


def _field(writer: ExpressionText, node: TreeNode) -> str:
    struct = type_of(node.children[0])
    if not isinstance(struct, dict) or struct.get("type") != "struct":
        raise NotRendered("a field of something other than a struct")
    return _named_field(writer, node, struct["fields"][node.fields["ordinal"]]["name"], struct)


def _array_field(writer: ExpressionText, node: TreeNode) -> str:
    array = type_of(node.children[0])
    if not isinstance(array, dict) or not isinstance(array.get("elementType"), dict):
        raise NotRendered("a field of something other than an array of structs")
    struct = array["elementType"]
    return _named_field(writer, node, struct["fields"][node.fields["ordinal"]]["name"], struct)


def _named_field(writer: ExpressionText, node: TreeNode, name: str, struct: Any) -> str:
    # SQL reads fields by name, case-insensitively, so two such names would be ambiguous.
    if [field["name"].lower() for field in struct["fields"]].count(name.lower()) > 1:
        raise NotRendered(f"the field {name}, which occurs twice")
    return f"({writer.write(node.children[0])}).{quote(name)}"


def _item(writer: ExpressionText, node: TreeNode) -> str:
    check_mode(node, ansi=writer.ansi)
    value, place = (writer.write(child) for child in node.children)
    return f"({value})[{place}]"


def _date_add(writer: ExpressionText, node: TreeNode) -> str:
    """Write the addition of days, which may be those of an interval."""
    value, days = node.children
    sign = "+"
    if days.name == "UnaryMinus":
        sign, days = "-", days.children[0]
    if days.name == "ExtractANSIIntervalDays":
        return f"({writer.write(value)} {sign} {writer.write(days.children[0])})"
    return writer.call(node)


def _with_unit(function: str) -> SpecialForm:
    def write(writer: ExpressionText, node: TreeNode) -> str:
        check_settings(node, ("unit",))
        unit = node.fields["unit"]
        if not unit.isalpha():
            raise NotRendered(f"the unit {unit}")
        return f"{function}({unit.upper()}, {writer.many(node.children)})"

    return write


def _options(writer: ExpressionText, node: TreeNode) -> str:
    """Return the options of a function as a last argument; "" if there are none."""
    pairs = node.fields.get("options") or []
    raw = writer.raw_strings
    texts = [
        string_text(text, raw=raw)
        for key, value in ((pair["_1"], pair["_2"]) for pair in pairs)
        for text in (key, value)
    ]
    return f", map({', '.join(texts)})" if texts else ""


def _to_text(writer: ExpressionText, node: TreeNode) -> str:
    check_settings(node, ("options",))
    return _called(writer, node, _options(writer, node))


def _from_text(writer: ExpressionText, node: TreeNode) -> str:
    check_settings(node, ("options", "schema"))
    schema = string_text(type_text(node.fields["schema"]), raw=writer.raw_strings)
    return _called(writer, node, f", {schema}{_options(writer, node)}")


def _called(writer: ExpressionText, node: TreeNode, behind: str) -> str:
    name = writer.functions.name_of(node.name)
    if name is None:
        raise NotRendered(node.name)
    return f"{name}({writer.write(node.children[0])}{behind})"


def _flagged(field: str, plain: str, trying: str) -> SpecialForm:
    """Return a form that writes one of two functions, chosen by a flag that does not depend on the
    session's mode."""

    def write(writer: ExpressionText, node: TreeNode) -> str:
        check_settings(node, (field, "targetType"))
        name = plain if node.fields[field] else trying
        kind = node.fields.get("targetType")
        behind = "" if kind is None else f", '{type_text(kind)}'"
        return f"{name}({writer.many(node.children)}{behind})"

    return write


def _session_flagged(plain: str, field: str = "failOnError") -> SpecialForm:
    """Return a form that writes a function, or its try_ form if the flag differs from the session's
    ANSI mode, with the kind of timestamp that it makes."""

    def write(writer: ExpressionText, node: TreeNode) -> str:
        check_settings(node, ("dataType",))
        # In ANSI mode, only the try_ form makes an expression that does not fail.
        trying = writer.ansi and not node.fields[field]
        if not trying:
            check_mode(node, ansi=writer.ansi)
        suffix = {None: "", "timestamp": "_ltz", "timestamp_ntz": "_ntz"}[
            node.fields.get("dataType")
        ]
        if trying and plain == "to_timestamp":
            if suffix != "_ltz":
                raise NotRendered("try_to_timestamp without a time zone")
            suffix = ""
        name = f"{'try_' if trying else ''}{plain}{suffix}"
        return f"{name}({writer.many(node.children)})"

    return write


def _collation(writer: ExpressionText, node: TreeNode) -> str:
    return string_text(node.fields["collationName"].rsplit(".", 1)[-1], raw=True)


def _binary_pad(writer: ExpressionText, node: TreeNode) -> str:
    name = node.fields["funcName"]
    if name not in ("lpad", "rpad"):
        raise NotRendered(f"BinaryPad of {name}")
    return f"{name}({writer.many(node.children)})"


def _try_eval(writer: ExpressionText, node: TreeNode) -> str:
    time = node.children[0]
    if time.name != "ToTime" or time.fields.get("stale"):
        raise NotRendered(f"TryEval of {time.name}")
    return f"try_to_time({writer.many(time.children)})"


def _size(writer: ExpressionText, node: TreeNode) -> str:
    # By default, size(NULL) is -1 without ANSI mode and NULL with it.
    if node.fields["legacySizeOfNull"] is writer.ansi:
        raise NotRendered("size with a non-default result for NULL")
    return f"size({writer.write(node.children[0])})"


def _raise_error(writer: ExpressionText, node: TreeNode) -> str:
    name, parameters = node.children
    if name.fields.get("value") != "USER_RAISED_EXCEPTION" or len(parameters.children) != 2:
        raise NotRendered("raise_error with an error class")
    return f"raise_error({writer.write(parameters.children[1])})"


def _precise_conversion(writer: ExpressionText, node: TreeNode) -> str:
    """Write the conversion that a time window applies to its column. These functions do not round
    either."""
    kinds = (node.fields["fromType"], node.fields["toType"])
    value = writer.write(node.children[0])
    if kinds == ("timestamp", "long"):
        return f"unix_micros({value})"
    if kinds == ("long", "timestamp"):
        return f"timestamp_micros({value})"
    raise NotRendered("a conversion of {} to {}".format(*kinds))


def _lambda(writer: ExpressionText, node: TreeNode) -> str:
    body, *variables = (writer.write(child) for child in node.children)
    # SQL parses a single variable in parentheses as an expression.
    listed = variables[0] if len(variables) == 1 else f"({', '.join(variables)})"
    return f"{listed} -> {body}"


def _lambda_variable(writer: ExpressionText, node: TreeNode) -> str:
    # By id, since nested lambdas may use a name twice.
    return f"lambda_{node.fields['exprId']}"


def _refused(reason: str) -> SpecialForm:
    def write(writer: ExpressionText, node: TreeNode) -> str:
        raise NotRendered(reason)

    return write


SPECIAL_FORMS: Final[dict[str, SpecialForm]] = {
    "Alias": _child,
    "Between": _between,
    "BinaryPad": _binary_pad,
    "CaseWhen": _case,
    "Cast": _cast,
    "CsvToStructs": _from_text,
    "DateAdd": _date_add,
    "GetArrayItem": _item,
    "GetArrayStructFields": _array_field,
    "GetMapValue": _item,
    "GetStructField": _field,
    "ILike": _like("ILIKE"),
    "In": _in,
    "JsonToStructs": _from_text,
    # Marks of the analyser, which do not change values.
    "KnownNotNull": _child,
    "KnownNullable": _child,
    "LambdaFunction": _lambda,
    "Like": _like("LIKE"),
    "LikeAll": _like_several("LIKE ALL"),
    "LikeAny": _like_several("LIKE ANY"),
    "MakeTimestamp": _session_flagged("make_timestamp"),
    "ParseJson": _flagged("failOnError", "parse_json", "try_parse_json"),
    "ParseToDate": _session_flagged("to_date", "ansiEnabled"),
    "ParseToTimestamp": _session_flagged("to_timestamp"),
    "RaiseError": _raise_error,
    "ResolvedCollation": _collation,
    "VariantArrayAppend": _flagged(
        "failOnError", "variant_array_append", "try_variant_array_append"
    ),
    "VariantGet": _flagged("failOnError", "variant_get", "try_variant_get"),
    "VariantInsert": _flagged("failOnError", "variant_insert", "try_variant_insert"),
    "VariantSet": _flagged("failOnError", "variant_set", "try_variant_set"),
    "NamedLambdaVariable": _lambda_variable,
    "NotLikeAll": _like_several("NOT LIKE ALL"),
    "NotLikeAny": _like_several("NOT LIKE ANY"),
    "OuterReference": _refused("a column of an outer query"),
    "PreciseTimestampConversion": _precise_conversion,
    "PythonUDAF": _refused("a Python aggregate function"),
    "PythonUDF": _refused("a Python function"),
    "ScalaUDF": _refused("a user-defined function"),
    "SchemaOfCsv": _to_text,
    "SchemaOfJson": _to_text,
    "SchemaOfXml": _to_text,
    "Size": _size,
    "StringTrim": _trim("BOTH"),
    "StringTrimLeft": _trim("LEADING"),
    "StringTrimRight": _trim("TRAILING"),
    "StructsToCsv": _to_text,
    "StructsToJson": _to_text,
    "StructsToXml": _to_text,
    "TempResolvedColumn": _child,
    "TimestampAdd": _with_unit("timestampadd"),
    "TimestampDiff": _with_unit("timestampdiff"),
    "TimestampAddInterval": _timestamp_sum,
    "TryEval": _try_eval,
    "UpCast": _cast,
    "XmlToStructs": _from_text,
}

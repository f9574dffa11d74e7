"""Renders the chart's templates as Helm does, as far as they go: `with`, `if`, `range`, pipes of
`quote`, `upper`, `nindent` and `toYaml`. Anything else is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

_TAG: Final = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_RANGE: Final = re.compile(r"range (?:\$(\w+), \$(\w+) := )?(\S+)")


def _pieces(template: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text): ``text`` or ``tag``; a dash takes the blanks beside it away."""
    at, trim = 0, False
    for found in _TAG.finditer(template):
        text = template[at : found.start()]
        text = text.lstrip() if trim else text
        yield "text", text.rstrip() if found[1] else text
        yield "tag", found[2]
        at, trim = found.end(), bool(found[3])
    yield "text", template[at:].lstrip() if trim else template[at:]


def _look(path: str, scope: Mapping[str, Any]) -> Any:
    if path.startswith("$"):
        return scope[path]
    if path == ".":
        return scope["."]
    value: Any = scope["root"]
    for name in path.strip(".").split("."):
        value = value[name]  # KeyError: the template names a value that there is not
    return value


def _evaluated(expression: str, scope: Mapping[str, Any]) -> str:
    first, *pipes = (part.strip() for part in expression.split("|"))
    words = first.split()
    if words[0] == "toYaml":
        value: Any = yaml.safe_dump(_look(words[1], scope), default_flow_style=False).rstrip()
    else:
        (path,) = words
        value = _look(path, scope)
    for pipe in pipes:
        match pipe.split():
            case ["quote"]:
                value = json.dumps(str(value))
            case ["upper"]:
                value = str(value).upper()
            case ["nindent", count]:
                lines = str(value).splitlines()
                value = "\n" + "\n".join(" " * int(count) + line for line in lines)
            case _:
                raise ValueError(f"the chart uses {pipe!r}, which this does not know")
    return str(value)


def _block(pieces: Iterator[tuple[str, str]], scope: dict[str, Any], *, shown: bool) -> str:
    """Render until the `end` of this block."""
    made = []
    for kind, text in pieces:
        if kind == "text":
            made.append(text)
        elif text == "end":
            break
        elif text.startswith("if "):
            made.append(_block(pieces, scope, shown=shown and bool(_look(text[3:], scope))))
        elif text.startswith("with "):
            value = _look(text[5:], scope) if shown else None
            made.append(_block(pieces, {**scope, ".": value}, shown=bool(value)))
        elif (found := _RANGE.fullmatch(text)) is not None:
            made.append(_repeated(list(_body(pieces)), found, scope, shown=shown))
        elif shown:
            made.append(_evaluated(text, scope))
    return "".join(made) if shown else ""


def _body(pieces: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for kind, text in pieces:  # no block within a `range` here
        yield kind, text
        if (kind, text) == ("tag", "end"):
            return


def _repeated(
    body: list[tuple[str, str]], found: re.Match[str], scope: dict[str, Any], *, shown: bool
) -> str:
    if not shown:
        return ""
    many = _look(found[3], scope)
    rows = sorted(many.items()) if isinstance(many, dict) else list(enumerate(many))
    made = []
    for key, value in rows:
        inner = {**scope, ".": value, f"${found[1]}": key, f"${found[2]}": value}
        made.append(_block(iter(body), inner, shown=True))
    return "".join(made)


def render(template: str, values: dict[str, Any], release: str = "blue") -> dict[str, Any]:
    """Return the object that a template makes. Raises for a value that does not exist, and for
    text that is no YAML."""
    root = {"Values": values, "Release": {"Name": release}}
    text = _block(_pieces(template), {"root": root, ".": root}, shown=True)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def schema_faults(value: Any, schema: Mapping[str, Any], where: str = "values") -> list[str]:
    """Return what of a value is against a JSON schema, of the few keywords that the chart's has."""
    known = {
        "$schema", "type", "properties", "required", "additionalProperties", "items", "enum",
        "minimum", "maximum", "minLength",
    }  # fmt: skip
    faults = [f"{where}: the schema's {key} is not known here" for key in schema.keys() - known]
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    if not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool):
        return [*faults, f"{where}: no {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        faults.append(f"{where}: none of {schema['enum']}")
    if isinstance(value, int) and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        faults.append(f"{where}: out of range")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        faults.append(f"{where}: too short")
    if isinstance(value, list):
        for number, each in enumerate(value):
            faults += schema_faults(each, schema["items"], f"{where}[{number}]")
    if isinstance(value, dict):
        faults += [
            f"{where}: no {name}" for name in schema.get("required", ()) if name not in value
        ]
        rest = schema.get("additionalProperties", True)
        for name, each in value.items():
            below = schema.get("properties", {}).get(name, rest)
            if below is False:
                faults.append(f"{where}: {name} is not known")
            elif below is not True:
                faults += schema_faults(each, below, f"{where}.{name}")
    return faults

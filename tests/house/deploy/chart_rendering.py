"""Renders the chart's templates as Helm does, as far as they go: blocks (`if`, `else`, `with`,
`range`, `define`), pipes, and the functions of `_FUNCTIONS`. Anything else is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

_TAG: Final = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_WORD: Final = re.compile(r'"[^"]*"|[()|]|[^\s()|]+')
_RANGE: Final = re.compile(r"range (?:\$(\w+), \$(\w+) := )?(\S+)")
_BLOCKS: Final = ("if", "with", "range", "define")

Scope = dict[str, Any]


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


def _indented(count: int, text: str) -> str:
    return "\n" + "\n".join(" " * count + line for line in text.splitlines())


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "add": lambda *numbers: sum(numbers),
    "dict": lambda *words: dict(zip(words[::2], words[1::2], strict=True)),
    "eq": lambda one, other: one == other,
    "nindent": _indented,
    "printf": lambda form, *values: form % values,
    "quote": lambda value: json.dumps(str(value)),
    "ternary": lambda yes, no, chosen: yes if chosen else no,
    "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip(),
    "upper": str.upper,
}


class ChartTemplates:
    """Templates of one chart: what one of them defines another may include."""

    def __init__(self, folder: Path) -> None:
        self._texts = {path.name: path.read_text() for path in sorted(folder.iterdir())}
        self._defined: dict[str, list[tuple[str, str]]] = {}
        for name in [name for name in self._texts if name.startswith("_")]:
            self._block(_pieces(self._texts.pop(name)), {}, shown=True)

    def render(
        self, values: Mapping[str, Any], release: str = "blue", namespace: str = "lab"
    ) -> list[dict[str, Any]]:
        """Return the objects that the templates make. Raises for a value that does not exist, and
        for text that is no YAML."""
        root = {"Values": values, "Release": {"Name": release, "Namespace": namespace}}
        made = (
            self._block(_pieces(text), {"$": root, ".": root}, shown=True)
            for text in self._texts.values()
        )
        return [each for text in made for each in yaml.safe_load_all(text) if each is not None]

    def _block(self, pieces: Iterator[tuple[str, str]], scope: Scope, *, shown: bool) -> str:
        """Render until the `end` of this block; from an `else` on the contrary is shown."""
        made, until_else = [], shown
        for kind, text in pieces:
            word = text.partition(" ")[0]
            if kind == "text":
                made.append(text if shown else "")
            elif text == "end":
                break
            elif text == "else":
                shown = scope.get("else", False) and not until_else
            elif word in _BLOCKS:
                made.append(self._inner(word, text, pieces, scope, shown=shown))
            elif shown and not text.startswith("/*"):
                made.append(str(self._evaluated(text, scope)))
        return "".join(made)

    def _inner(
        self, word: str, text: str, pieces: Iterator[tuple[str, str]], scope: Scope, *, shown: bool
    ) -> str:
        rest = text.removeprefix(word).strip()
        if word == "define":
            self._defined[json.loads(rest)] = list(_body(pieces))
            return ""
        if word == "range":
            body, found = list(_body(pieces)), _RANGE.fullmatch(text)
            assert found is not None, text
            return self._repeated(body, found, scope) if shown else ""
        value = self._evaluated(rest, scope) if shown else None
        inner = {**scope, "else": shown, **({".": value} if word == "with" else {})}
        return self._block(pieces, inner, shown=bool(value))

    def _repeated(self, body: list[tuple[str, str]], found: re.Match[str], scope: Scope) -> str:
        many = self._evaluated(found[3], scope)
        rows = sorted(many.items()) if isinstance(many, dict) else list(enumerate(many))
        made = []
        for key, value in rows:
            inner = {**scope, ".": value, f"${found[1]}": key, f"${found[2]}": value}
            made.append(self._block(iter(body), inner, shown=True))
        return "".join(made)

    def _evaluated(self, expression: str, scope: Scope) -> Any:
        words = _WORD.findall(expression)
        value = self._pipe(words, scope)
        assert not words, f"{expression}: {words} is left over"
        return value

    def _pipe(self, words: list[str], scope: Scope) -> Any:
        """Evaluate up to the end or a bracket; what stands before a bar is the last argument."""
        value = self._call(words, scope, ())
        while words and words[0] == "|":
            words.pop(0)
            value = self._call(words, scope, (value,))
        return value

    def _call(self, words: list[str], scope: Scope, last: tuple[Any, ...]) -> Any:
        name = words[0]
        if name != "include" and name not in _FUNCTIONS:
            assert not last, f"the chart uses {name!r}, which this does not know"
            return self._argument(words, scope)
        words.pop(0)
        given = []
        while words and words[0] not in ")|":
            given.append(self._argument(words, scope))
        if name != "include":
            return _FUNCTIONS[name](*given, *last)
        template, value = given
        inner = {"$": value, ".": value}
        return self._block(iter(self._defined[template]), inner, shown=True)

    def _argument(self, words: list[str], scope: Scope) -> Any:
        word = words.pop(0)
        if word == "(":
            value = self._pipe(words, scope)
            assert words.pop(0) == ")"
            return value
        if word.startswith('"'):
            return json.loads(word)
        if word.isdigit():
            return int(word)
        if word.startswith("$"):
            return scope[word]
        assert word.startswith("."), f"the chart uses {word!r}, which this does not know"
        value = scope["."]
        for name in word.strip(".").split(".") if word != "." else ():
            value = value[name]  # KeyError: the template names a value that there is not
        return value


def _body(pieces: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield what a block holds, its `end` included."""
    open_blocks = 1
    for kind, text in pieces:
        if kind == "tag":
            open_blocks += (text.partition(" ")[0] in _BLOCKS) - (text == "end")
        yield kind, text
        if open_blocks == 0:
            return


_KINDS: Final = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_KEYWORDS: Final = {
    "$schema", "type", "properties", "required", "additionalProperties", "items", "enum", "const",
    "minimum", "maximum", "minLength", "if", "then", "anyOf",
}  # fmt: skip


def schema_faults(value: Any, schema: Mapping[str, Any], where: str = "values") -> list[str]:
    """Return what of a value is against a JSON schema, of the few keywords that the chart's has."""
    faults = [f"{where}: the schema's {key} is not known here" for key in schema.keys() - _KEYWORDS]
    if (kind := schema.get("type")) is not None and (
        not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return [*faults, f"{where}: no {kind}"]
    if "if" in schema and not schema_faults(value, schema["if"], where):
        faults += schema_faults(value, schema["then"], where)
    if "anyOf" in schema and all(schema_faults(value, each, where) for each in schema["anyOf"]):
        faults.append(f"{where}: none of several")
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        faults.append(f"{where}: none of the values that may be")
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

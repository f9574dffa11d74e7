"""Golden bytes: every message that crosses a wire, encoded, as it was when it was first sent.

``golden_frames.txt`` has a line a message type: its name and the hex of one example. A line
never changes: a field that is added comes last, with a default, and bytes of before still mean
what they meant (the example decodes to what it was, new fields at their defaults). To add the
lines of new types, run this file as a program.
"""

from __future__ import annotations

import enum
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
from wire_names import wire_name  # type: ignore[import-not-found]

from actors.model.plan import jobs
from actors.model.protocol import api, compute, storage
from actors.runtime.frames import FORMERLY_TRACED

FILE = Path(__file__).with_name("golden_frames.txt")
WIRES: dict[str, Any] = {
    "client to service": api.ClientHello | api.Request,
    "service to client": api.ServiceHello | api.Answer,
    "controller to cluster": compute.Command,
    "cluster to controller": compute.Response,
    "service to engine": jobs.Job,
    "controller to storage": storage.Command,
    "storage to controller": storage.Response,
    "engine to service": jobs.Answer,
}
"""All that crosses a wire, by direction. (An engine is a child of the very same version: the lines
of its jobs may change, and its `EngineStart` is not here.)"""


def members(union: Any) -> list[type[msgspec.Struct]]:
    return list(get_args(union)) if get_args(union) else [union]


CONTEXT_MOVED = FORMERLY_TRACED | {"PeekResponse"}
"""Messages whose trace context was a field, and is the frame's header now (`test_frames.py` reads
it in either place). That of `PeekResponse` was never set."""

KINDS = [(wire, kind) for wire, union in WIRES.items() for kind in members(union)]


def example(kind: Any, name: str, depth: int = 0) -> Any:
    """A value of a type, always the same; every optional thing is there, if it is not too deep."""
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, typing.TypeVar) or kind is Any:
        return name
    if origin in (typing.Union, types.UnionType):
        given = [arg for arg in args if arg is not type(None)]
        return None if depth > 6 and len(given) < len(args) else example(given[0], name, depth)
    if origin is typing.Literal:
        return args[0]
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return () if depth > 6 else (example(args[0], name, depth + 1),)
        return tuple(example(arg, name, depth + 1) for arg in args)
    if origin is list:
        return [] if depth > 6 else [example(args[0], name, depth + 1)]
    if origin is dict:
        return {example(args[0], name, depth + 1): example(args[1], name, depth + 1)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        fields = msgspec.structs.fields(kind)
        # Values are made of names on the wire: attributes may be renamed.
        made = {f.name: example(hints[f.name], f.encode_name, depth + 1) for f in fields}
        return kind(**made)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    plain: dict[Any, Any] = {
        bool: True,
        int: len(name),
        float: len(name) + 0.5,
        str: name,
        bytes: name.encode(),
    }
    return plain[kind]


def extends(new: Any, old: Any) -> bool:
    """Whether what was there is as it was, and what was added comes last, at every depth."""
    match old:
        case dict():
            return list(new)[: len(old)] == list(old) and all(
                extends(new[name], old[name]) for name in old
            )
        case list():
            return len(new) == len(old) and all(map(extends, new, old))
    return bool(new == old)


def label(wire: str, kind: type[Any]) -> str:
    return f"{wire}: {wire_name(kind)}"


def golden() -> dict[str, bytes]:
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    found = (line.rpartition(": ") for line in lines)
    return {name: bytes.fromhex(text) for name, _, text in found}


@pytest.mark.parametrize(("wire", "kind"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_bytes_are_what_they_were(wire: str, kind: type[msgspec.Struct]) -> None:
    before = golden().get(label(wire, kind))
    assert before is not None, f"no golden bytes of {label(wire, kind)}: run {Path(__file__).name}"
    message = example(kind, wire_name(kind))
    now = msgspec.msgpack.encode(message)
    decoded = msgspec.msgpack.decode(before, type=WIRES[wire])
    assert type(decoded) is kind
    if now == before:
        assert decoded == message
        return
    was = msgspec.msgpack.decode(before)
    if wire_name(kind) in CONTEXT_MOVED:
        was.pop("traceparent", None)
    # Fields were added: they are last, and what was there before is what it was.
    assert extends(msgspec.msgpack.decode(now), was)


def test_no_message_has_gone() -> None:
    """An old peer still sends it."""
    assert golden().keys() <= {label(wire, kind) for wire, kind in KINDS}


def test_added_fields_come_last() -> None:
    old = {"type": "A", "a": [{"b": 1}]}
    assert extends({"type": "A", "a": [{"b": 1, "c": 2}], "d": 3}, old)
    assert not extends({"type": "A", "d": 3, "a": [{"b": 1}]}, old)
    assert not extends({"type": "A", "a": [{"c": 2, "b": 1}]}, old)
    assert not extends({"type": "A", "a": [{"b": 2}]}, old)
    assert not extends({"type": "A"}, old)


def test_a_field_that_changes_its_place_or_name_is_noticed() -> None:
    class Moved(msgspec.Struct, tag="Hello"):
        other: str
        nonce: str

    before = golden()["controller to cluster: Hello"]
    with pytest.raises(msgspec.ValidationError, match="other"):
        msgspec.msgpack.decode(before, type=Moved)


if __name__ == "__main__":
    known = golden()
    with FILE.open("a") as file:
        for wire, kind in KINDS:
            if label(wire, kind) not in known:
                text = msgspec.msgpack.encode(example(kind, wire_name(kind))).hex()
                file.write(f"{label(wire, kind)}: {text}\n")

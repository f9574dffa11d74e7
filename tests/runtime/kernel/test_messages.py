"""What actors exchange: frozen structs that cost the garbage collector nothing."""

from __future__ import annotations

import importlib
import pkgutil
import types
import typing
from typing import Any

import msgspec
import pytest

import actors
from actors.runtime.kernel import Actor

ASIDE = "actors.testing"


def of(kind: type[Any]) -> set[type[Any]]:
    found = set()
    for each in kind.__subclasses__():
        found |= {each} | of(each)
    return found


def members(union: Any) -> list[Any]:
    if typing.get_origin(union) in (typing.Union, types.UnionType):
        return [kind for each in typing.get_args(union) for kind in members(each)]
    # A message that is generic counts once, whatever it carries.
    return [typing.get_origin(union) or union]


def messages() -> list[type[Any]]:
    for module in pkgutil.walk_packages(actors.__path__, "actors."):
        if not module.name.startswith(ASIDE) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: dict[str, type[Any]] = {}
    for kind in of(Actor):
        if kind.__module__.startswith("actors.") and not kind.__module__.startswith(ASIDE):
            for message in members(typing.get_type_hints(kind.receive)["message"]):
                found[f"{message.__module__}.{message.__qualname__}"] = message
    return [found[name] for name in sorted(found)]


MESSAGES = messages()


def test_every_actor_was_found() -> None:
    names = {message.__name__ for message in MESSAGES}
    assert {
        "ConnectClient",
        "EnqueueWrite",
        "FetchPart",
        "SequencedCommand",
        "StartListen",
        "SubmitJob",
        "UpdatesInstalled",
    } <= names


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_messages_are_frozen_and_not_tracked(kind: type[Any]) -> None:
    assert issubclass(kind, msgspec.Struct), f"{kind} is no struct"
    config = kind.__struct_config__
    assert config.frozen, f"{kind.__name__}: frozen=True"
    assert not config.gc, f"{kind.__name__}: gc=False"

"""Options of sources: one that a kind does not have is refused, with the nearest that it has."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

from actors.connectors.sinks import kinds as sink_kinds
from actors.connectors.sources import kinds
from actors.connectors.sources.kinds import KINDS, check_names
from actors.runtime.errors import InvalidUsage


def options_of(kind: str) -> list[str]:
    """The options that a kind has."""
    (made,) = (each for each in kinds._MAKERS if each.__struct_config__.tag == kind)
    return [each.name for each in msgspec.structs.fields(made) if each.name != "token"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_knows_its_options_and_no_others(kind: str) -> None:
    for name in options_of(kind):
        check_names(msgspec.json.encode({"type": kind, name: 1}), kind)
        # A letter too many, as a typing error has it.
        wrong = f"{name}_"
        with pytest.raises(InvalidUsage, match=rf"no option '{wrong}'.*did you mean '{name}'\?"):
            check_names(msgspec.json.encode({"type": kind, wrong: 1}), kind)
    # What tells a source from others is the service's to set.
    for name in ("zzzzzzzz", "token"):
        with pytest.raises(InvalidUsage, match=f"a source of kind {kind} has no option '{name}'"):
            check_names(msgspec.json.encode({"type": kind, name: "x"}), kind)


def test_a_connection_without_tls_is_not_made_by_a_typing_error() -> None:
    given = msgspec.json.encode({"type": "postgres", "host": "h", "ssl_mode": "verify-full"})
    with pytest.raises(InvalidUsage, match=r"no option 'ssl_mode'.*; did you mean 'sslmode'"):
        check_names(given, "postgres")


FEW = [
    (made, field)
    for made in (*kinds._MAKERS, *sink_kinds.KINDS.values())
    for field in msgspec.structs.fields(made)
    if get_origin(field.type) is Literal
]
"""The options that have a few values, with their kinds of sources and sinks."""


@pytest.mark.parametrize(("made", "field"), FEW)
def test_an_option_of_a_few_values_lists_them(made: Any, field: Any) -> None:
    others = [each for each in msgspec.structs.fields(made) if each.required and each != field]
    needed: dict[str, Any] = {each.name: "x" if each.type is str else {} for each in others}
    kind, given = str(made.__struct_config__.tag), needed | {field.name: "other"}
    with pytest.raises(InvalidUsage, match="other") as failed:
        if made in kinds._MAKERS:
            kinds.decode(msgspec.json.encode({"type": kind, **given}))
        else:
            sink_kinds.config_of(kind, given, "c")
    listed = " or ".join(get_args(field.type))
    assert str(failed.value).endswith(f": {field.name} is {listed}"), failed.value

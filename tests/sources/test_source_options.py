"""Options of sources: one that a kind does not have is refused, with the nearest that it has."""

from __future__ import annotations

import msgspec
import pytest

from actors.connectors.sources import kinds
from actors.connectors.sources.kinds import KINDS, check_names
from actors.errors import InvalidUsage


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

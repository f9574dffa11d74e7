"""Test writing and parsing of the compatibility page."""

from __future__ import annotations

from capabilities import DOORS
from compatibility_page import PAGE, ClientSight, Sighting, differences, page_of, read_page
from sql_differences import read_section


def test_the_page_is_as_it_would_be_written() -> None:
    said = read_page(PAGE.read_text())
    assert page_of(said, read_section(PAGE.read_text())) == PAGE.read_text()
    for door in DOORS:
        for client in door.clients:
            assert said[client].seen.keys() == door.capabilities.keys(), client


def test_what_differs_is_told() -> None:
    text = PAGE.read_text()
    psql = read_page(text)["psql"]
    assert differences(text, psql._replace(version="99")) == []
    seen = psql.seen | {"connect": Sighting("no", "it is gone")}
    (wrong,) = differences(text, ClientSight("psql", "15", seen))
    assert "it is gone; the page: yes" in wrong
    assert differences(text, psql._replace(seen={"connect": Sighting("yes")})) != []

"""A Spark Connect server's address: what is shown of it, what is refused, and its secrets."""

from __future__ import annotations

import pytest

from actors.engine.spark.remote_address import is_remote, redact_secrets, strip_parameters
from actors.runtime.errors import BadSettings

SECRET = "sc://spark.example:443/;use_ssl=true;token=open%20sesame;x-api-key=k3y;user_id=ann"


@pytest.mark.parametrize(
    ("master", "place"),
    [
        ("sc://127.0.0.1:7001", "sc://127.0.0.1:7001"),
        ("sc://spark.example", "sc://spark.example:15002"),
        ("sc://spark.example:443/;use_ssl=true;token=abc", "sc://spark.example:443"),
        ("sc://[::1]:7001/", "sc://[::1]:7001"),
    ],
)
def test_what_is_shown(master: str, place: str) -> None:
    assert is_remote(master)
    assert strip_parameters(master) == place


@pytest.mark.parametrize(
    ("master", "words"),
    [
        ("sc://", "expected the form sc://HOST:PORT"),
        ("sc://host:port", "expected the form sc://HOST:PORT"),
        ("sc://host:70000", "expected the form sc://HOST:PORT"),
        ("sc://host/path;token=hush", "expected the form sc://HOST:PORT"),
        ("sc://hush@host:1", "expected the form sc://HOST:PORT"),
        ("sc://host:1?token=hush", "expected the form sc://HOST:PORT"),
        ("sc://host:1/;token", "parameter 'token'"),
        ("sc://host:1/;token=hush=hush", "parameter 'token'"),
        ("sc://host:1/;session_id=hush", "must not name a session_id"),
    ],
)
def test_what_is_refused(master: str, words: str) -> None:
    with pytest.raises(BadSettings, match="spark_master") as caught:
        strip_parameters(master)
    assert words in str(caught.value)
    assert "hush" not in str(caught.value)


def test_other_masters_are_not_remote() -> None:
    assert not is_remote("local[*]")
    assert not is_remote("spark://host:7077")
    assert redact_secrets("token=abc", "local[*]") == "token=abc"


def test_secrets_are_taken_out_of_texts() -> None:
    text = f"cannot reach {SECRET}: 'open sesame' and k3y are wrong, says ann"
    assert redact_secrets(text, SECRET) == (
        "cannot reach sc://spark.example:443/;use_ssl=true;token=***;x-api-key=***;user_id=ann: "
        "'***' and *** are wrong, says ann"
    )

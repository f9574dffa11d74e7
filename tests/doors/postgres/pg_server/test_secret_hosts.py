"""A secret of the service goes to hosts that are listed for it, and is shown to no server that
nobody has verified."""

from __future__ import annotations

import hashlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from test_role_rights import denied, roles_world  # type: ignore[import-not-found]

SSL_REQUEST, GSS_REQUEST = 80877103, 80877104
CLEARTEXT, MD5 = 3, 5
PASSWORD = "CANARY-PASSWORD"


def ask_clients(method: int, answers: Path) -> None:
    """Ask each client for its password by one method, without TLS; write a line for each."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    salt = b"salt" if method == MD5 else b""
    while True:
        client, _ = listener.accept()
        with client:
            code = SSL_REQUEST
            while code in (SSL_REQUEST, GSS_REQUEST):
                message = client.recv(1000)
                code = int.from_bytes(message[4:8], "big")
                if code in (SSL_REQUEST, GSS_REQUEST):
                    client.sendall(b"N")
            client.sendall(b"R" + struct.pack("!II", 8 + len(salt), method) + salt)
            answer = client.recv(1000)
        with answers.open("a") as lines:
            lines.write(f"{answer!r}\n")


@contextmanager
def asking_server(method: int, answers: Path) -> Iterator[int]:
    """Run such a server, in a separate process as libpq holds ours while it connects; yield its
    port."""
    command = [sys.executable, __file__, str(method), str(answers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def shows_password(answer: str) -> bool:
    """Return whether a client has shown it, or its MD5."""
    digest = hashlib.md5(PASSWORD.encode() + b"u").hexdigest()
    salted = hashlib.md5(digest.encode() + b"salt").hexdigest()
    return PASSWORD in answer or salted in answer


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", [CLEARTEXT, MD5])
@pytest.mark.parametrize("weak", [False, True])
async def test_who_may_send_a_secret_where(tmp_path: Path, method: int, weak: bool) -> None:
    secrets, answers = tmp_path / "secrets", tmp_path / "answers"
    secrets.mkdir()
    answers.touch()
    (secrets / "production").write_text(f"{PASSWORD}\n")
    settings = {"secret_dir": str(secrets), "source_weak_passwords": weak}
    with asking_server(method, answers) as port:
        create = (
            f"CREATE SOURCE s USING postgres OPTIONS (host = '127.0.0.1', port = '{port}',"
            f" user = 'u', password_file = '{secrets}/production') FOR TABLES (public.t AS t)"
        )
        async with roles_world(tmp_path, **settings) as (_, boss, app):
            await boss.execute("GRANT create TO app")
            words = f"production.hosts, and 127.0.0.1:{port} is not listed"
            assert words in await denied(app, create)
            (secrets / "production.hosts").write_text("db.example")
            for who in (app, boss):
                assert "it may go only to hosts" in await denied(who, create)
            assert not answers.read_text()
            (secrets / "production.hosts").unlink()
            for who in (boss, app):
                with pytest.raises(psycopg.Error) as failed:
                    await who.execute(create)
                assert ("authentication method requirement" in str(failed.value)) == (not weak)
                (secrets / "production.hosts").write_text(f"127.0.0.1:{port}")
    lines = answers.read_text().splitlines()
    assert len(lines) >= 2 if weak else True
    assert any(map(shows_password, lines)) == weak


if __name__ == "__main__":
    ask_clients(int(sys.argv[1]), Path(sys.argv[2]))

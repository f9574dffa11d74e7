"""Servers that stores are tested on, once for the session, and one fixture for each store."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from persist_world import KINDS, client_of  # type: ignore[import-not-found]
from store_houses import PIECE, StoreHouse  # type: ignore[import-not-found]

import azure_server  # type: ignore[import-not-found]
import google_server  # type: ignore[import-not-found]
import s3_server  # type: ignore[import-not-found]
from actors.durable.persist import PersistClient
from actors.testing.postgres_server import PostgresServer

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_session() -> Iterator[s3_server.S3]:
    with s3_server.serving() as served:
        yield served


@pytest.fixture
def s3(s3_session: s3_server.S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.S3]:
    """An S3 server, and an environment that points to it. Pieces are small."""
    s3_session.forget()
    s3_server.point_to(monkeypatch, s3_session)
    _small_pieces(monkeypatch)
    yield s3_session
    s3_session.forget()


@pytest.fixture(scope="session")
def azure_session() -> Iterator[azure_server.Azure]:
    with azure_server.serving() as served:
        yield served


@pytest.fixture
def azure(azure_session: azure_server.Azure, monkeypatch: pytest.MonkeyPatch) -> azure_server.Azure:
    azure_server.point_to(monkeypatch, azure_session)
    _small_pieces(monkeypatch)
    return azure_session


@pytest.fixture(scope="session")
def google_session() -> Iterator[google_server.Google]:
    with google_server.serving() as served:
        yield served


@pytest.fixture
def google(
    google_session: google_server.Google, monkeypatch: pytest.MonkeyPatch
) -> Iterator[google_server.Google]:
    google_session.forget()
    google_server.point_to(monkeypatch, google_session)
    _small_pieces(monkeypatch)
    yield google_session
    google_session.forget()


def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.durable.object_store.bucket_store.PIECE_BYTES", PIECE)
    monkeypatch.setattr("actors.durable.persist.blob_bucket.PIECE_BYTES", PIECE)


@pytest.fixture(params=["memory", "file", "objects", "s3", "azure", "google"])
def blobs(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StoreHouse:
    """Each store of blobs."""
    if request.param == "objects":
        _small_pieces(monkeypatch)
    return _house(request, tmp_path)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> StoreHouse:
    """Each store of documents."""
    return _house(request, tmp_path)


def _house(request: pytest.FixtureRequest, tmp_path: Path) -> StoreHouse:
    match request.param:
        case "s3":
            url = f"s3://{request.getfixturevalue('s3').new_bucket()}/some/where"
        case "google":
            url = f"gs://{request.getfixturevalue('google').new_bucket()}/some/where"
        case "azure":
            url = f"az://{request.getfixturevalue('azure').new_container()}/some/where"
        case "postgres":
            server: PostgresServer = request.getfixturevalue("postgres")
            url = f"postgresql://bench@127.0.0.1:{server.port}/postgres?schema=s{next(_NUMBERS)}"
        case "memory":
            url = f"mem:{next(_NUMBERS)}-{request.node.name[:20].partition('[')[0]}"
        case "file":
            url = f"file:{tmp_path}/blob"
        case "sqlite":
            url = f"sqlite:{tmp_path}/consensus.db"
        case _:
            url = "objects"
    return StoreHouse(request.param, url)


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PersistClient]:
    """A client over each pair of stores."""
    made = await client_of(request.param, tmp_path)
    yield made
    await made.close()

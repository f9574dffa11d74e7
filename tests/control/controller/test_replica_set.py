"""Which replicas there are to be: the durable document."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from actors.control.controller.replicas import instance as replica_set
from actors.control.controller.replicas.instance import (
    REPLICAS_KEY,
    decode,
    encode,
    names_of,
)
from actors.durable.persist import CompareAndSet, PersistClient
from actors.runtime.errors import CorruptData, StateDirectoryError, StorageError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SETTINGS = Settings(replicas=3, retry_delay_ms_min=1, retry_delay_ms_max=2)


def test_names_are_the_last_word() -> None:
    found = decode(encode(3, ["r2", "extra"]))
    assert names_of(found, 3) == ("r2", "extra")
    assert names_of(found, 2) == ("r1", "r2")
    assert names_of(None, 2) == ("r1", "r2")


def test_a_document_of_another_kind_is_refused() -> None:
    with pytest.raises(StateDirectoryError, match="format 7"):
        decode(msgspec.msgpack.encode({"format": 7}))
    for data in (b"", b"\xc1", msgspec.msgpack.encode({"format": 1, "names": 5})):
        with pytest.raises(CorruptData, match="replicas"):
            decode(data)


class Faults:
    """A store that says it failed: before (`determinate`), or after it has done so."""

    def __init__(self, persist: PersistClient, fates: str) -> None:
        self.persist = persist
        self.fates = list(fates)
        self._set = persist.compare_and_set
        persist.compare_and_set = self.compare_and_set  # type: ignore[method-assign]

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        fate = self.fates.pop(0) if self.fates else " "
        if fate == "d":
            raise StorageError("it did not happen", determinate=True)
        if fate == "n":
            raise StorageError("it may have happened, and did not", determinate=False)
        done = await self._set(ops)
        if fate == "h":
            raise StorageError("it may have happened, and did", determinate=False)
        return done


@pytest.mark.parametrize(
    ("fates", "durable", "raised"),
    [
        (" ", True, None),
        ("h", True, None),
        ("n ", True, None),
        ("nnh", True, None),
        ("d", False, True),
        ("nnnnn", False, False),
        ("nd ", True, None),
    ],
)
async def test_what_is_said_is_what_is_durable(
    fates: str, durable: bool, raised: bool | None
) -> None:
    persist = await PersistClient.in_memory(SETTINGS, SystemClock())
    await replica_set.store_names(persist, SETTINGS, ["r1", "r2"])
    Faults(persist, fates)
    try:
        await replica_set.store_names(persist, SETTINGS, ["r2", "extra"])
        found = None
    except StorageError as error:
        found = error.determinate
    assert found == raised
    names = await replica_set.load(persist, SETTINGS)
    assert names == (("r2", "extra") if durable else ("r1", "r2"))
    head = await persist.head(REPLICAS_KEY)
    await replica_set.store_names(persist, SETTINGS, names)
    assert await persist.head(REPLICAS_KEY) == head, "what is so already is not written again"
    await persist.close()

"""The durable record of a dropped source's external resource; see `external_cleanup`."""

from __future__ import annotations

from typing import Final

import msgspec

from actors.control.controller.catalog.catalog import CatalogObject
from actors.durable.persist import CompareAndSet, PersistClient
from actors.model.protocol.storage import ConnectorConfiguration
from actors.runtime.errors import CorruptData
from actors.runtime.progress import ObjectId

PREFIX: Final = "leftover/"


class CleanupRecord(msgspec.Struct, frozen=True):
    """A dropped source and its external resource."""

    id: ObjectId
    name: str
    configuration: ConnectorConfiguration
    kept: str
    """External name of the resource, such as that of a replication slot."""

    @property
    def key(self) -> str:
        """Return the consensus key of the record."""
        return PREFIX + self.id


def cleanup_record_of(entry: CatalogObject, kept: str) -> CleanupRecord:
    """Return the record for a source that is being dropped."""
    assert entry.configuration is not None, entry.name
    return CleanupRecord(entry.id, entry.name, entry.configuration, kept)


def record_cas(record: CleanupRecord) -> CompareAndSet:
    """Return the compare-and-set that stores the record, for the same set as the catalog."""
    # Ids are never reused, so the key is new.
    return CompareAndSet(record.key, None, msgspec.msgpack.encode(record))


async def load(persist: PersistClient) -> tuple[CleanupRecord, ...]:
    """Return all records. Raises `StorageError`, `CorruptData`."""
    found = []
    for key in await persist.list_keys(PREFIX):
        head = await persist.head(key)
        if head is None:
            continue
        try:
            found.append(msgspec.msgpack.decode(head.data, type=CleanupRecord))
        except msgspec.MsgspecError as error:
            raise CorruptData(f"consensus key {key!r}: {error}", determinate=True) from None
    return tuple(found)


async def delete_record(persist: PersistClient, record: CleanupRecord) -> None:
    """Delete the record, once the resource is removed or left to the user. Raises
    `StorageError`."""
    head = await persist.head(record.key)
    while head is not None:
        if await persist.compare_and_set([CompareAndSet(record.key, head.seqno, None)]):
            return
        head = await persist.head(record.key)

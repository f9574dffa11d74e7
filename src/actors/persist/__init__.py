"""Durable, versioned shards. This file re-exports what the rest of the project uses."""

from actors.persist.client import PersistClient as PersistClient
from actors.persist.filtering import FilterAudit as FilterAudit
from actors.persist.filtering import PartCondition as PartCondition
from actors.persist.filtering import PartFilter as PartFilter
from actors.persist.filtering import PartVerdict as PartVerdict
from actors.persist.location import CompareAndSet as CompareAndSet
from actors.persist.location import VersionedData as VersionedData
from actors.persist.reader import LeasedReader as LeasedReader
from actors.persist.schemas import SchemaEvolved as SchemaEvolved
from actors.persist.schemas import SchemaMismatch as SchemaMismatch
from actors.persist.shard import TABLES_UPPER as TABLES_UPPER
from actors.persist.shard import AppendCommitted as AppendCommitted
from actors.persist.shard import BatchPart as BatchPart
from actors.persist.shard import CopyCommitted as CopyCommitted
from actors.persist.shard import NewShard as NewShard
from actors.persist.shard import ReaderLease as ReaderLease
from actors.persist.shard import ShardAppend as ShardAppend
from actors.persist.shard import ShardBatch as ShardBatch
from actors.persist.shard import ShardState as ShardState
from actors.persist.shard import UpperMismatch as UpperMismatch
from actors.persist.shard import placed as placed
from actors.persist.shard import shard_key as shard_key

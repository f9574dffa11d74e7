"""Durable, versioned shards. This file re-exports what the rest of the project uses."""

from actors.durable.persist.client import PersistClient as PersistClient
from actors.durable.persist.location import CompareAndSet as CompareAndSet
from actors.durable.persist.location import VersionedData as VersionedData
from actors.durable.persist.part_filter import FilterAudit as FilterAudit
from actors.durable.persist.part_filter import PartCondition as PartCondition
from actors.durable.persist.part_filter import PartFilter as PartFilter
from actors.durable.persist.part_filter import PartVerdict as PartVerdict
from actors.durable.persist.reader import LeasedReader as LeasedReader
from actors.durable.persist.schemas import SchemaEvolved as SchemaEvolved
from actors.durable.persist.schemas import SchemaMismatch as SchemaMismatch
from actors.durable.persist.shard import TABLES_UPPER as TABLES_UPPER
from actors.durable.persist.shard import AppendCommitted as AppendCommitted
from actors.durable.persist.shard import BatchPart as BatchPart
from actors.durable.persist.shard import CopyCommitted as CopyCommitted
from actors.durable.persist.shard import NewShard as NewShard
from actors.durable.persist.shard import ReaderLease as ReaderLease
from actors.durable.persist.shard import ShardAppend as ShardAppend
from actors.durable.persist.shard import ShardBatch as ShardBatch
from actors.durable.persist.shard import ShardState as ShardState
from actors.durable.persist.shard import UpperMismatch as UpperMismatch
from actors.durable.persist.shard import placed as placed
from actors.durable.persist.shard import shard_key as shard_key

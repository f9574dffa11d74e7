"""Durable, versioned shards. This file re-exports what the rest of the project uses."""

from actors.persist.client import PersistClient as PersistClient
from actors.persist.critical import CriticalReader as CriticalReader
from actors.persist.filtering import Audit as Audit
from actors.persist.filtering import Condition as Condition
from actors.persist.filtering import PartFilter as PartFilter
from actors.persist.filtering import Verdict as Verdict
from actors.persist.location import Cas as Cas
from actors.persist.location import VersionedData as VersionedData
from actors.persist.reader import Reader as Reader
from actors.persist.schemas import Evolved as Evolved
from actors.persist.schemas import SchemaMismatch as SchemaMismatch
from actors.persist.shard import TABLES_UPPER as TABLES_UPPER
from actors.persist.shard import Append as Append
from actors.persist.shard import Appended as Appended
from actors.persist.shard import Batch as Batch
from actors.persist.shard import Copied as Copied
from actors.persist.shard import Lease as Lease
from actors.persist.shard import NewShard as NewShard
from actors.persist.shard import Part as Part
from actors.persist.shard import ShardState as ShardState
from actors.persist.shard import UpperMismatch as UpperMismatch
from actors.persist.shard import placed as placed
from actors.persist.shard import shard_key as shard_key

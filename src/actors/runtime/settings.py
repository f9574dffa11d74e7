"""Every limit, with its unit, and the asserted relations between limits.

`Settings` is one frozen record; `Settings.check` holds the arithmetic that ties limits to one
another. Values come from defaults, a TOML file, ``PENSTOCK_*`` environment variables and flags,
in rising precedence (`load`).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from actors.runtime.errors import BadSettings, nearest_hint

FRAME_OVERHEAD_BYTES = 4096
"""Bytes of a frame beside a result: names, trace context, names of fields."""
UNPROVEN_BYTES_MIN, UNPROVEN_BYTES_MAX = 8 * 1024, 32 * 1024
"""Bounds of `unproven_bytes_max`."""
TOKEN_BYTES_MAX = 64
"""Length of a nonce and of a peek's uuid."""
NAME_BYTES_MAX = 256
"""Length of an object's id."""
REPLICAS_MAX = 5
"""Replicas of one instance."""
BUCKET_URL: Final = re.compile(
    r"(?P<kind>s3|gs|az)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,221}[a-z0-9])"
    r"(?P<path>(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._=@+,-]+)*)/?"
)
"""A bucket (az: a container) and a path below it, without credentials, port or query."""

BUCKET_SETTINGS: Final = ("copy_buckets", "source_buckets", "sink_buckets")
"""Settings that are lists of such URLs."""
LIST_SETTINGS: Final = (*BUCKET_SETTINGS, "engine_environment")
"""Settings that are lists; in text: separated by commas."""
ENVIRONMENT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
"""Name of a variable of the environment; with a star: all that begin so."""
MAPPINGS: Final = ("spark_conf",)
"""Settings with names of their own: from a TOML file alone, not from the environment."""


def without_user(url: str) -> str:
    """Return a URL as it may be shown."""
    scheme, found, rest = url.partition("://")
    # What stands before an @ may be a secret.
    return scheme + found + rest.rpartition("@")[2]


def backoff_ms(failures: int, delay_ms_min: int, delay_ms_max: int) -> int:
    """Return how long to wait after so many failures in a row (from 1): doubled by each.

    >>> [backoff_ms(failures, 50, 1000) for failures in (1, 2, 3, 99)]
    [50, 100, 200, 1000]
    """
    # The shift is bounded, as the count of failures is not.
    return min(delay_ms_max, delay_ms_min << min(failures - 1, 30))


MAY_BE_ZERO: Final = frozenset(
    {"group_commit_ms", "engine_disk_bytes_max", "engine_niceness", "engine_spare_tasks_max"}
)
"""Settings whose 0 means: not at all."""
_ASCENDING: Final = (
    ("inline_part_bytes_max", "inline_bytes_per_shard_max"),
    ("inline_bytes_per_shard_max", "state_bytes_max"),
    ("retry_delay_ms_min", "retry_delay_ms_max"),
    ("engine_killer_retry_ms_min", "engine_killer_retry_ms_max"),
)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of a service. Sizes in bytes, delays in milliseconds."""

    # where
    state_dir: str = "state"
    listen: str = "127.0.0.1:6874"
    """Address of the client listener: host:port (port 0 takes a free one) or unix:/path."""
    pg_listen: str = ""
    """Address of the listener for PostgreSQL's clients, in the same way; empty: there is none."""
    pg_connections_max: int = 100
    """Clients of PostgreSQL's protocol at a time."""
    pg_plaintext_on_loopback: bool = False
    """True if PostgreSQL's clients on this machine may stay unencrypted although TLS is set."""
    sql_rows_bytes_max: int = 256 * 1024 * 1024
    """Bytes of rows that one SQL statement, or one transaction, changes."""
    sql_followed_queries_max: int = 64
    """Queries that SUBSCRIBE follows by views of their own, at a time."""
    cluster_listen: str = ""
    """Address of the replica protocol's listener, in the same way; empty: in process only."""
    storage_listen: str = ""
    """Address of the listener of its storage half."""
    role: Literal["", "controller", "replica"] = ""
    """Part of a service that this process is, beside others on the same stores; empty: all."""
    cluster_advertise: str = ""
    """Host by which controllers reach this replica; empty: that of `cluster_listen`."""
    workers: int = 2
    """Workers of one replica."""
    replicas: int = 1
    """Whole clusters of the instance in this process, named r1, r2, … (at most 5)."""
    standby_ms: int = 1_000
    """Wait of a standby: of several replicas, one that was not the first to write a view waits so
    long for the other's next step, before it makes that step itself."""

    # mailboxes and frames
    frame_bytes_max: int = 64 * 1024 * 1024
    engine_frame_bytes_max: int = 512 * 1024 * 1024
    connections_max: int = 64
    unproven_connections_max: int = 64
    """Connections of each listener that have not proved themselves yet, apart from those that have;
    beyond it the oldest of them is dropped."""
    unproven_bytes_max: int = 16 * 1024
    """Bytes of a frame, message or password that such a connection may send."""
    stash_responses_max: int = 4096
    """Responses one channel adapter keeps for nonces not yet served."""
    commands_in_flight_max: int = 32
    """Commands of one half of a worker between the adapter and their place in the order of both."""
    responses_in_flight_max: int = 64
    """Responses of one worker handed to its channel adapter and not yet taken by the client."""
    peeks_pending_max: int = 16_384
    """Unanswered peeks of one replica's client; more are refused with `ResourceBusy`."""
    requests_in_flight_max: int = 256
    """Unanswered requests of one client connection."""
    dataflows_max: int = 65_536
    """Dataflows of one replica's client; more are refused."""
    connect_timeout_ms: int = 5_000
    frame_timeout_ms: int = 120_000
    """Timeout of a whole frame, from its beginning."""
    write_timeout_ms: int = 30_000
    """A peer that takes no byte of what waits for it for so long is given up (at most
    `idle_timeout_ms`)."""
    idle_timeout_ms: int = 30_000
    keepalive_ms: int = 5_000

    # time
    retain_history_ms: int = 3_600_000
    """Distance of a since behind its upper, unless an object says otherwise."""
    index_history_ms: int = 60_000
    """History for which an index serves reads; older ones are read from the shard."""
    oracle_reserve_ms: int = 5_000
    peek_deadline_ms: int = 30_000
    query_deadline_ms: int = 300_000
    """A query's rows must be there by then, unless it says otherwise."""
    replace_deadline_ms: int = 60_000
    """A view that is computed must be further than the one that it replaces by then."""
    queries_in_flight_max: int = 4
    """Queries that Spark runs for clients at a time; further ones wait."""
    queries_waiting_max: int = 256
    """Queries that wait for those that run; more are refused with `ResourceBusy`."""
    query_engine: str = "auto"
    """Spark of queries and clients of Spark Connect: `own`, started at the first query; `shared`:
    they run in that of the views, and can end it; `auto`: `own` where the machine has twice the
    memory of both heaps."""
    query_engine_memory: str = ""
    """Heap of that Spark; empty: as `spark_driver_memory`."""
    query_disk_bytes_max: int = 16 * 1024 * 1024 * 1024
    """Disk that its answers, spilled rows and exchanges take; beyond it the running queries fail
    with `JobTooLarge`."""
    group_commit_ms: int = 0
    """Wait of the first write of a group for others. While a group is committed the next one
    gathers, so that many writers share a group without any."""
    hold_downgrade_ms: int = 1_000
    clock_tick_ms: int = 1_000
    """Interval at which idle tables are sealed while a view over them follows the clock."""
    maintenance_ms: int = 250
    reclaim_ms: int = 60_000
    """Interval at which space is given back: of shards that do not grow, and of their history."""

    # storage
    part_bytes_target: int = 64 * 1024 * 1024
    inline_part_bytes_max: int = 16 * 1024
    inline_bytes_per_shard_max: int = 128 * 1024
    state_bytes_max: int = 256 * 1024
    """Size of a shard's document; near it, appends wait for compaction."""
    part_list_parts_min: int = 16
    """A batch of so many parts is described by a blob of its own, not in its shard's document."""
    part_statistics_bytes_max: int = 1024
    """Size of a part's statistics in the state: the least and the greatest value of columns."""
    filter_parts: bool = True
    """True if a view's input leaves out parts that hold no row for it."""
    filter_audit_one_in: int = 100
    """Share of the parts that a filter by statistics leaves out: one in so many is read all the
    same, to prove the filter right."""
    decoded_parts_bytes_max: int = 32 * 1024 * 1024
    """Size of parts kept as they were decoded or written, for readers at about the same time."""
    batches_per_shard_max: int = 24
    """Compaction starts beyond this many batches."""
    reader_lease_ms: int = 900_000
    blob_orphan_grace_ms: int = 600_000

    backup_blobs_in_flight_max: int = 4
    """Blobs that a backup or restore copies at a time; each is in memory meanwhile."""

    # stores elsewhere: files, buckets, PostgreSQL
    blob_url: str = ""
    """URL of the store of shards' parts; see `actors.durable.persist.store_urls`. Empty: in the
    state directory.
    """
    consensus_url: str = ""
    """URL of the store of documents: everything else that is durable. Empty: in the state
    directory."""
    store_request_timeout_ms: int = 15_000
    """Timeout of one request to a bucket, and of one transaction of PostgreSQL."""
    store_request_retries_max: int = 3
    """Retries of one request that can be made again."""
    disk_timeout_ms: int = 60_000
    """Timeout of one operation on local files, and of one transaction of SQLite."""
    store_poll_ms: int = 500
    """Interval at which a store is polled that other processes write and that sends no
    notifications."""
    standby: bool = False
    """True if the service waits until no other one owns its stores, and only then starts."""
    heartbeat_ms: int = 500
    """Interval at which the owner of stores by URL tells that it is alive, and at which one that
    stands by looks."""
    takeover_ms: int = 3_000
    """One that stands by takes over when it has seen no heartbeat for so long."""
    store_requests_in_flight_max: int = 32
    """Requests of one process to one bucket; further ones wait."""
    store_bytes_in_flight_max: int = 128 * 1024 * 1024
    """The same in bytes of objects that are read or written; one that is larger goes alone."""

    # dataflows
    inflight_bytes_per_dataflow_max: int = 64 * 1024 * 1024
    fetches_in_flight_max: int = 8
    """Fetches of one fetch task at a time."""
    fetch_attempts_max: int = 5
    """Attempts to read one part or listing, while the store fails; then the input freezes."""
    described_in_flight_max: int = 16
    """Descriptions that a listen task sends ahead of its consumer's grants."""
    hydration_chunk_bytes: int = 128 * 1024 * 1024
    """Size of a chunk of the inputs' parts: a view of projections, filters and UNION ALL is
    computed first in such chunks, each noted when it is done."""
    lookup_rows_max: int = 200_000
    """A step that touches more rows of one arrangement scans its shard in Spark instead."""
    step_pairs_max: int = 20_000_000
    """A step of several times whose changes would make more pairs with the rows that they meet is
    halved; of one time there is no smaller one."""
    arrangement_lag_bytes_max: int = 256 * 1024 * 1024
    """Bytes of a shared arrangement that one dataflow that lags behind may keep from being
    compacted. Beyond this it goes on alone, with an arrangement of its own."""
    arrangement_slack_ms: int = 1_000
    """Distance of a shared arrangement's since behind its users, so that new ones join."""
    eager_aggregation_rows_min: int = 1_000
    """A view's sums of a table are kept below its join to another if the table has so many rows for
    each of the other's when the view is made; each change of it then keeps one state more."""
    hidden_rows_whole_max: int = 2_000
    """Hidden aggregate state up to this many groups goes into a step whole (one stratum less)."""
    hydrations_max: int = 4
    """Dataflows that read their first contents at a time; further ones wait suspended."""
    retry_delay_ms_min: int = 50
    retry_delay_ms_max: int = 10_000
    result_bytes_max: int = 48 * 1024 * 1024
    """Size of a response's rows. More of a subscribe's changes go to the client by the stash; a row
    of a peek that is larger is an error to its reader."""
    inline_bytes_max: int = 4 * 1024 * 1024
    """Size of one worker's part of a peek's result, and of what a subscribe begins with; larger
    ones go to the client by the stash, in pieces of this size."""
    stash_orphan_ms: int = 600_000
    """A stashed result or batch that was not read by then is removed."""
    subscribe_inflight_bytes_max: int = 16 * 1024 * 1024
    subscribe_idle_ms: int = 60_000
    """A subscriber that takes nothing of what waits for it for so long is cut off."""
    log_rows_max: int = 1024
    """Steps, and jobs of the engine, that are remembered for the relations of the service."""

    # sources
    source_dirs: str = ""
    """Folders below which sources and copies may read files, with `:` (Windows: `;`) between;
    empty: none may be read."""
    secret_env_prefix: str = "PENSTOCK_SECRET_"
    """A source's password may come from environment variables that begin so, from no others: the
    user who makes a source chooses where the password is sent."""
    secret_dir: str = ""
    """Files with passwords and keys of sources lie below this folder; empty: there are none."""
    source_weak_passwords: bool = False
    """True if a source may show its password to a PostgreSQL server that asks for it in the clear,
    or by MD5, without TLS that is verified; else it is proved by SCRAM alone there."""
    source_buckets: tuple[str, ...] = ()
    """Sources and copies may read at or below these URLs (s3://bucket/prefix, gs://…,
    az://container/…), in no other bucket; empty: in none. In text: separated by commas."""
    source_spool_bytes_max: int = 4 * 1024 * 1024 * 1024
    """Size of the objects of a bucket that one source or copy has on local disk at a time; none
    that is larger can be read."""
    file_decoded_bytes_max: int = 1024 * 1024 * 1024
    """Decoded size of one file of a source or copy, or a hundred times the size of the file if that
    is more; and of what is decoded of it at a time. A larger one stops its source."""
    file_record_bytes_max: int = 32 * 1024 * 1024
    """Length of one line of CSV or JSON, or of a file of JSON that is read as one record."""
    source_tick_ms: int = 1_000
    """Interval at which the shards of an idle source are sealed up to now."""
    statistics_ms: int = 1_000
    """Interval at which sources and sinks report what they have done."""
    source_inflight_bytes_max: int = 32 * 1024 * 1024
    """Bytes of rows of one source that were read and are not durable yet. More of one transaction
    are written as parts before it ends."""

    # copies from files
    copy_parts_max: int = 4_096
    """Parts of one copy into a table; each holds about `source_inflight_bytes_max` of rows."""
    copy_keyed_rows_max: int = 1_000_000
    """Rows of one copy into a table with a PRIMARY KEY: their keys are looked up when it is
    appended."""

    # copies into files
    copy_dir: str = ""
    """Copies are written below this folder, and nowhere else; empty: `copies` of the state
    directory."""
    copy_buckets: tuple[str, ...] = ()
    """Copies may be written at or below these URLs (s3://bucket/prefix, gs://…, az://container/…),
    in no other bucket; empty: in none. In text: separated by commas."""
    copies_max: int = 4
    """Copies at a time, of all clients, into files and again from files; more are refused with
    `ResourceBusy`."""
    copy_request_timeout_ms: int = 30_000
    """Timeout of one request to the store of a bucket, also those of sources and sinks."""
    copy_request_retries_max: int = 4
    """Retries of one request that the store failed or did not answer; then the copy fails, and a
    source or a sink is started again."""

    # sinks
    sink_dir: str = ""
    """Sinks write below this folder, and into no other; empty: into none."""
    sink_buckets: tuple[str, ...] = ()
    """Sinks may write at or below these URLs (s3://bucket/prefix, gs://…, az://container/…), in no
    other bucket; empty: in none. In text: separated by commas."""
    sink_commit_ms: int = 1_000
    """Interval between two commits of a sink, at least."""
    sink_bytes_max: int = 64 * 1024 * 1024
    """Size of one commit of a sink, about; more where one batch of the shard alone holds more."""
    sink_frontier_ms: int = 60_000
    """Interval at which a sink moves its upper while nothing changes."""
    sink_deadline_ms: int = 60_000
    """Deadline of one blocking call of a sink, which is then started again."""

    # engine
    spark_master: str = "local[*]"
    spark_driver_memory: str = "2g"
    spark_conf: dict[str, str] = {}
    engine_environment: tuple[str, ...] = ()
    """Further variables of the service's environment that Spark and users' functions have, beside
    those that Spark, Java, Python and the store of parts need. A name that ends in `*` stands for
    all that begin so. In text: separated by commas."""
    engine_start_timeout_ms: int = 120_000
    engine_jobs_in_flight_max: int = 16
    engine_spare_tasks_max: int = 8
    """Tasks that a `local` Spark runs beyond its cores, for jobs that wait behind endless ones."""
    engine_queue_max: int = 1024
    """Jobs that wait for a place in the engine; more are refused with `ResourceBusy`."""
    engine_disk_bytes_max: int = 0
    """Disk that an engine's answers, spilled rows and exchanges take; beyond it the queries that
    run there fail with `JobTooLarge`. 0: no limit."""
    engine_niceness: int = 0
    """Niceness of an engine's processes; see nice(1)."""
    engine_inline_bytes_max: int = 8 * 1024 * 1024
    """Rows above this size go to the engine as a file; a job of fewer runs in one partition."""
    engine_part_copies: bool = False
    """Copy large parts of a bucket into scratch for Spark, in place of having Spark read them
    there: for a Spark that cannot reach the bucket, and sees the state directory."""
    engine_shuffle_partitions_max: int = 1_000
    """Partitions of an exchange of a large job on a cluster: as many as it has cores, at most these
    and at least two. Spark joins small ones while it runs."""
    engine_collected_bytes_max: int = 32 * 1024 * 1024
    """Bounds what a step reads for its answer to be collected by Spark's driver: beyond it, rows
    that no grouping makes fewer go into files, and so do answers of more rows than fit into
    twice as much."""
    engine_plan_nodes_max: int = 400
    """Nodes of one Spark plan of strata that run together; larger ones are done in pieces."""
    view_plan_nodes_max: int = 8_000
    """Nodes of all pieces of a step in which all inputs change; a view that needs more is
    recomputed."""
    engine_attempts_max: int = 2
    """A job during which the engine dies this often, with nothing beside it, is given up with
    `JobTooLarge`."""
    engine_killer_retry_ms_min: int = 60_000
    """Pause before such a job is run again, and the view that it is for is computed: once, alone.
    The pause doubles each time that the job kills again."""
    engine_killer_retry_ms_max: int = 3_600_000
    prepared_plans_max: int = 128
    """Plans of steps that the engine keeps ready to be executed again, of all dataflows. Each
    takes about 0.6 MB of the driver's heap for every input that it reads."""
    prepared_plans_per_dataflow_max: int = 16
    prepared_slot_bytes_max: int = 32 * 1024 * 1024
    """Size of one input of a prepared step, as Arrow; larger steps are planned anew."""

    # the gateway for clients of Spark Connect; see `actors.doors.connect_gateway`
    connect_listen: str = ""
    """Address of the Spark Connect gateway: host:port (port 0 takes a free one); empty: none."""
    connect_connections_max: int = 256
    """Connections of Connect clients that have proved themselves."""
    connect_sessions_max: int = 64
    """Sessions of Connect clients at a time; more are refused with `ResourceBusy`."""
    connect_session_idle_ms: int = 3_600_000
    """A session that asks for nothing for so long, and runs nothing, is released."""
    connect_operations_max: int = 16
    """Operations of all Connect clients that have not ended; more are refused with
    `ResourceBusy`."""
    connect_streams_max: int = 16
    """Streaming queries of all Connect clients; more are refused with `ResourceBusy`."""
    connect_detached_ms: int = 300_000
    """An operation to which no client is attached for so long is given up."""
    connect_kept_max: int = 20_000
    """Sessions, and operations, that changed something: of the last so many none is repeated."""
    connect_message_bytes_max: int = 128 * 1024 * 1024
    """Size of one message of a Connect client, and of an answer to it."""
    connect_bodies_bytes_max: int = 512 * 1024 * 1024
    """Bytes of all messages of Connect clients that are being received or carried out; further
    messages wait, and are refused with `ResourceBusy` if they wait for long."""
    connect_inline_bytes_max: int = 8 * 1024 * 1024
    """Rows of objects that go to Spark inside a plan; larger contents are read by Spark from the
    shard's files."""

    # who may connect; see `actors.runtime.transport.security`
    identity: str = ""
    """The service's name; of a client: the name of the one it means. Both given: equal."""
    tls_certificate: str = ""
    """PEM file of our certificate; with `tls_key` and `tls_authority`: mutual TLS 1.3."""
    tls_key: str = ""
    tls_authority: str = ""
    """PEM file of the one authority that both sides' certificates must be signed by."""
    token_file: str = ""
    """Bearer tokens of clients, one a line; empty: none is asked for, or shown."""
    cluster_token_file: str = ""
    """The same for the replica protocol."""

    # who may do what; see `actors.control.access`
    roles_required: bool = False
    """True if clients of PostgreSQL's protocol and of Spark Connect must prove a role also while
    there is none that may log in."""
    roles_max: int = 1_000
    """Roles at a time."""
    roles_bytes_max: int = 4 * 1024 * 1024
    """Size of the document that holds all roles and their rights."""
    role_tokens_max: int = 16
    """Tokens of one role at a time."""
    pg_cleartext_passwords: bool = False
    """True if PostgreSQL's clients send their password as it is, inside TLS alone: for those that
    do not know SCRAM. Outside of TLS they prove it by SCRAM all the same."""
    audit_statements: bool = False
    """True if each statement of these clients is a line of the log `penstock.audit`."""
    audit_text_characters_max: int = 4_096
    """Characters of a statement's text in such a line; the rest is left out."""

    # the WAL's acceptor; see `actors.wal`
    wal_listen: str = "127.0.0.1:5454"
    """Address of `penstock wal serve`, for proposers and readers of the log: host:port."""
    wal_dir: str = "wal"
    """Folder of the acceptor's timelines, with a folder for each: tenant/timeline."""
    wal_node_id: int = 1
    """Number of this acceptor, among those of one log."""
    wal_jwt_keys: str = ""
    """Keys of those who sign tokens for acceptors: a public Ed25519 key as a PEM file, or a folder
    of them. Such a token is taken beside those of `token_file`; empty: none is."""
    wal_jwt_tenants_only: bool = False
    """True if of signed tokens only those for one tenant are taken."""
    wal_messages_max: int = 256
    """Messages of one proposer that are read and not yet in the log; then its socket is not
    read."""
    wal_replies_max: int = 16
    """Replies to one proposer that are not yet written to its socket; then its messages wait."""
    wal_idle_timeout_ms: int = 600_000
    """A peer that sends nothing for so long is given up."""
    wal_save_ms: int = 300
    """Interval at which a timeline whose positions moved is checked, whether to save them."""
    wal_control_age_ms: int = 300_000
    """Positions that moved and are in memory alone are saved after so long."""

    wal_peers: str = ""
    """The other acceptors of its logs: host:port,host:port; empty: the members that a timeline's
    configuration names."""
    wal_blob_url: str = ""
    """URL of a store that keeps committed whole segments; see `actors.durable.persist.store_urls`.
    Empty: they are kept nowhere else, and none is removed here."""
    wal_keep_bytes: int = 1024 * 1024 * 1024
    """Length of the log behind its commit that stays here although its segments are kept at
    `wal_blob_url`. Older segments go, also when consumers have not read them; those are read from
    there."""
    wal_offload_ms: int = 1_000
    """Interval at which timelines are checked for segments to offload."""
    wal_offload_turn_ms: int = 5_000
    """An acceptor waits so long for each that comes before it; then it keeps a segment itself."""
    wal_blob_timeout_ms: int = 60_000
    """Timeout of one segment, written and read back, or read."""

    # the WAL's proposers: `penstock wal push`, `relay`
    wal_heartbeat_ms: int = 1_000
    """Time after the last message to an acceptor at which it is sent an empty one."""
    wal_silence_ms: int = 10_000
    """An acceptor that owes a message for so long is hung up on, and dialled anew."""

    # the process
    pin_cores: bool = False
    """Pins the service's threads to one core and the engine's to the others; the log says which."""
    expiration_ms: int | None = None
    """The service ends this long after its start; None: never."""

    # being watched
    otlp: str = ""
    """Base URL of a receiver of traces (Jaeger: port 4318); empty: OpenTelemetry's environment
    variables say whether and where."""
    trace_file: str = ""
    """Traces are appended to this file too; `penstock trace` draws them."""
    metrics_listen: str = ""
    """host:port of the pages for monitors: measures, health and readiness; empty: none."""
    http_connections_max: int = 32
    """Connections to these pages at a time; beyond it the one that has waited longest is ended."""

    # stopping
    shutdown_deadline_ms: int = 15_000

    @property
    def piece_bytes_max(self) -> int:
        """Return the size of a piece of what goes by the stash."""
        return min(self.inline_bytes_max, self.result_bytes_max)

    def engine_killer_retry_ms(self, kills: int) -> int:
        """Return the pause before a job that has killed the engine so many times is run again."""
        return backoff_ms(kills, self.engine_killer_retry_ms_min, self.engine_killer_retry_ms_max)

    def retry_delay_ms(self, failures: int) -> int:
        """Return how long to wait after so many failures in a row (from 1): doubled by each."""
        return backoff_ms(failures, self.retry_delay_ms_min, self.retry_delay_ms_max)

    def _standby_relations(self) -> list[tuple[bool, str]]:
        return [
            (
                not self.standby or bool(self.consensus_url),
                "standby needs consensus_url: stores that the services share, as PostgreSQL",
            ),
            (
                self.heartbeat_ms * 2 <= self.takeover_ms,
                "heartbeat_ms must be at most half of takeover_ms",
            ),
        ]

    def _listener_relations(self) -> list[tuple[bool, str]]:
        return [
            (
                bool(self.tls_certificate) == bool(self.tls_key) == bool(self.tls_authority),
                "tls_certificate, tls_key and tls_authority must be given together",
            ),
            (
                UNPROVEN_BYTES_MIN <= self.unproven_bytes_max <= UNPROVEN_BYTES_MAX,
                f"unproven_bytes_max must lie between {UNPROVEN_BYTES_MIN} and "
                f"{UNPROVEN_BYTES_MAX}: a login fits, and much more must not",
            ),
            (
                2 * self.connect_message_bytes_max <= self.connect_bodies_bytes_max,
                "connect_bodies_bytes_max must be at least twice connect_message_bytes_max",
            ),
        ]

    def _role_relations(self) -> list[tuple[bool, str]]:
        if not self.role:
            return []
        shared = (
            f"role = {self.role} needs consensus_url and blob_url: stores that all processes of the"
            " service reach, as postgresql:// and s3:// (sqlite: and file: on one machine)"
        )
        urls = (self.consensus_url, self.blob_url)
        relations = [
            (all(urls) and not any(url.lower().startswith("mem:") for url in urls), shared),
            (
                self.replicas == 1,
                f"role = {self.role} and replicas = {self.replicas}: each further replica is a"
                " process of its own, penstock serve --role replica",
            ),
        ]
        if self.role == "replica":
            relations += [
                (
                    bool(self.cluster_listen),
                    "role = replica needs cluster_listen: where a controller connects, as"
                    " 10.0.0.2:6875",
                ),
                (not self.standby, "standby is for a controller: of replicas all run"),
                (
                    not (self.pg_listen or self.connect_listen),
                    "pg_listen and connect_listen are a controller's: a replica has no clients",
                ),
            ]
        else:
            relations.append(
                (
                    not (self.cluster_listen or self.storage_listen or self.cluster_advertise),
                    "cluster_listen, storage_listen and cluster_advertise are a replica's: a"
                    " controller connects to it",
                )
            )
        return relations

    def _wal_relations(self) -> list[tuple[bool, str]]:
        return [
            (
                self.wal_messages_max >= 8 and self.wal_replies_max >= 2,
                "wal_messages_max must be at least 8, and wal_replies_max at least 2: half of each "
                "is in hand while the other half waits",
            ),
            (
                self.wal_heartbeat_ms * 2 <= self.wal_silence_ms,
                "wal_heartbeat_ms must be at most half of wal_silence_ms",
            ),
        ]

    def _list_relations(self) -> list[tuple[bool, str]]:
        relations = [
            (
                BUCKET_URL.fullmatch(url) is not None,
                f"{name}: {without_user(url)!r} must be s3://bucket/prefix, "
                "gs://bucket/prefix or az://container/prefix; credentials come from the "
                "environment",
            )
            for name in BUCKET_SETTINGS
            for url in getattr(self, name)
        ]
        relations += [
            (
                not folder or Path(folder).is_absolute(),
                f"source_dirs: {folder!r} must be an absolute path; between several stands a "
                f"{os.pathsep!r}",
            )
            for folder in self.source_dirs.split(os.pathsep)
        ]
        relations += [
            (
                ENVIRONMENT_NAME.fullmatch(name) is not None,
                f"engine_environment: {name!r} must be the name of a variable, or MY_*",
            )
            for name in self.engine_environment
        ]
        return relations

    def _check_spark_conf(self) -> None:
        # Spark would put variables of the engine's environment into every text of every user.
        name = "spark.sql.variable.substitute"
        value = self.spark_conf.get(name, "false")
        if value.strip().lower() != "false":
            raise BadSettings(
                f"spark_conf: {name} = {value}: texts are taken as they are written, so that it is "
                "always false"
            )

    def _check_numbers(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 0 if name in MAY_BE_ZERO else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise BadSettings(f"{name} = {value}: must be greater than zero")

    def check(self) -> None:
        """Raise `BadSettings` when a limit is out of range or two contradict each other."""
        self._check_numbers()
        self._check_spark_conf()
        relations = [
            *(
                (getattr(self, less) <= getattr(self, more), f"{less} must not exceed {more}")
                for less, more in _ASCENDING
            ),
            (
                self.result_bytes_max + FRAME_OVERHEAD_BYTES <= self.frame_bytes_max,
                f"result_bytes_max must be less than frame_bytes_max by {FRAME_OVERHEAD_BYTES}: "
                "a result travels in a frame",
            ),
            *self._listener_relations(),
            (len(self.identity.encode()) <= 255, "identity must have at most 255 bytes"),
            (
                self.engine_inline_bytes_max < self.engine_frame_bytes_max,
                "engine_inline_bytes_max must be less than engine_frame_bytes_max",
            ),
            (
                self.keepalive_ms * 2 <= self.idle_timeout_ms,
                "keepalive_ms must be at most half of idle_timeout_ms",
            ),
            *self._standby_relations(),
            *self._role_relations(),
            *self._wal_relations(),
            (self.replicas <= REPLICAS_MAX, f"replicas must not exceed {REPLICAS_MAX}"),
            (
                self.replicas == 1 or not (self.cluster_listen or self.storage_listen),
                "cluster_listen and storage_listen serve one replica to others: they need "
                "replicas = 1",
            ),
        ]
        relations += self._list_relations()
        for holds, text in relations:
            if not holds:
                raise BadSettings(text)


_FLAGS: Final = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
"""Spellings of a setting that is on or off, in any case."""


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Return settings from defaults, a TOML file, the environment and flags, in rising precedence.

    Raises `BadSettings` naming the file, variable or flag that does not fit.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values |= tomllib.loads(file.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise BadSettings(f"cannot read settings from {file}: {error}") from None
    fields = {field.name: field for field in msgspec.structs.fields(Settings)}
    for name, text in (os.environ if environment is None else environment).items():
        key = name.removeprefix("PENSTOCK_").lower()
        if name.startswith("PENSTOCK_") and key in fields and key not in MAPPINGS:
            values[key] = text
    values |= {key: value for key, value in (flags or {}).items() if value is not None}
    for name in values:
        if name not in fields:
            raise BadSettings(f"there is no setting {name!r}{nearest_hint(name, fields)}")
        if fields[name].type is bool:
            values[name] = _FLAGS.get(str(values[name]).lower(), values[name])
    for name in LIST_SETTINGS:
        if isinstance(values.get(name), str):
            values[name] = [each for each in values[name].split(",") if each]
    try:
        # Not strict: most places have texts.
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise BadSettings(f"settings: {error}") from None
    settings.check()
    return settings

"""The settings of a service: every limit with its unit, and the rules that relate limits.

`Settings` is a frozen record, and `Settings.check` checks the rules. Values come from defaults, a
TOML file, ``PENSTOCK_*`` environment variables and flags, in rising precedence (`load`).
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
"""Bytes of a frame in addition to a result: names, trace context, field names."""
UNPROVEN_BYTES_MIN, UNPROVEN_BYTES_MAX = 8 * 1024, 32 * 1024
"""Range of `unproven_bytes_max`."""
TOKEN_BYTES_MAX = 64
"""Maximum length of a nonce, or of a peek's uuid, in bytes."""
NAME_BYTES_MAX = 256
"""Maximum length of an object's id, in bytes."""
REPLICAS_MAX = 5
"""Maximum number of replicas of one service."""
BUCKET_URL: Final = re.compile(
    r"(?P<kind>s3|gs|az)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,221}[a-z0-9])"
    r"(?P<path>(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._=@+,-]+)*)/?"
)
"""Matches the URL of a bucket (az: a container) and a path in it, without credentials, port or
query."""

BUCKET_SETTINGS: Final = ("copy_buckets", "source_buckets", "sink_buckets")
"""Settings that are lists of bucket URLs."""
LIST_SETTINGS: Final = (*BUCKET_SETTINGS, "engine_environment")
"""Settings that are lists; as text, separated by commas."""
ENVIRONMENT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
"""Matches the name of an environment variable, or a prefix followed by a star."""
MAPPINGS: Final = ("spark_conf",)
"""Settings that map names to values; they are read from a TOML file, not from the environment."""


def without_user(url: str) -> str:
    """Return a URL without user and password, for logs and errors."""
    scheme, found, rest = url.partition("://")
    # Everything before the last @ may be a secret.
    return scheme + found + rest.rpartition("@")[2]


def backoff_ms(failures: int, delay_ms_min: int, delay_ms_max: int) -> int:
    """Return the delay after this many failures in a row (from 1); it doubles with each failure.

    >>> [backoff_ms(failures, 50, 1000) for failures in (1, 2, 3, 99)]
    [50, 100, 200, 1000]
    """
    # Bound the shift, because the number of failures is unbounded.
    return min(delay_ms_max, delay_ms_min << min(failures - 1, 30))


MAY_BE_ZERO: Final = frozenset(
    {"group_commit_ms", "engine_disk_bytes_max", "engine_niceness", "engine_spare_tasks_max"}
)
"""Settings that may be 0, which turns the feature or the limit off."""
_ASCENDING: Final = (
    ("inline_part_bytes_max", "inline_bytes_per_shard_max"),
    ("inline_bytes_per_shard_max", "state_bytes_max"),
    ("retry_delay_ms_min", "retry_delay_ms_max"),
    ("engine_killer_retry_ms_min", "engine_killer_retry_ms_max"),
)
"""Pairs of settings of which the first must not exceed the second."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a service. Sizes are in bytes, times in milliseconds.

    A number is an upper limit, and a flag turns something on, unless its text says otherwise.
    """

    # addresses and the shape of the service
    state_dir: str = "state"
    """Directory for everything that the service keeps on local disk."""
    listen: str = "127.0.0.1:6874"
    """Address of the client listener: host:port (port 0 picks a free one) or unix:/path."""
    pg_listen: str = ""
    """Address of the listener for PostgreSQL clients, in the same form; empty: none."""
    pg_connections_max: int = 100
    """PostgreSQL connections at a time."""
    pg_plaintext_on_loopback: bool = False
    """Lets PostgreSQL clients on this machine connect without TLS although TLS is configured."""
    sql_rows_bytes_max: int = 256 * 1024 * 1024
    """Maximum number of bytes of rows that one SQL statement, or one transaction, may change."""
    sql_followed_queries_max: int = 64
    """Maximum number of queries that SUBSCRIBE follows through temporary views, at a time."""
    cluster_listen: str = ""
    """Address of the replica protocol's listener, in the same form; empty: in process only."""
    storage_listen: str = ""
    """Address of the listener for the storage half of the replica protocol."""
    role: Literal["", "controller", "replica"] = ""
    """Part of the service that this process runs, if several processes share the stores; empty: all
    of it."""
    cluster_advertise: str = ""
    """Host at which controllers reach this replica; empty: the host of `cluster_listen`."""
    workers: int = 2
    """Workers of one replica."""
    replicas: int = 1
    """Replicas in this process, named r1, r2, … (at most 5)."""
    standby_ms: int = 1_000
    """With several replicas, one that was not the first to write a step of a view waits this long
    for the other's next step, then computes it itself."""

    # connections, frames and queues
    frame_bytes_max: int = 64 * 1024 * 1024
    """Size of one frame of the client and replica protocols."""
    engine_frame_bytes_max: int = 512 * 1024 * 1024
    """Size of one frame between the service and an engine process."""
    connections_max: int = 64
    """Maximum number of connections of each listener of frames, and of a WAL acceptor, after their
    login."""
    unproven_connections_max: int = 64
    """Maximum number of connections of each listener before their login is complete. They are
    counted separately; one more drops the oldest of them."""
    unproven_bytes_max: int = 16 * 1024
    """Maximum size of a frame, message or password before the client's login is complete, in
    bytes."""
    stash_responses_max: int = 4096
    """Maximum number of responses that one channel adapter stashes for connections to come."""
    commands_in_flight_max: int = 32
    """Maximum number of commands of one half of a worker that are sent by its adapter and not yet
    sequenced."""
    responses_in_flight_max: int = 64
    """Maximum number of responses of one worker that the client has not acknowledged."""
    peeks_pending_max: int = 16_384
    """Unanswered peeks on one replica; more are refused with `ResourceBusy`."""
    requests_in_flight_max: int = 256
    """Unanswered requests of one client connection."""
    dataflows_max: int = 65_536
    """Maximum number of dataflows on one replica; more are refused."""
    connect_timeout_ms: int = 5_000
    """Timeout for connecting, including handshake and login."""
    frame_timeout_ms: int = 120_000
    """Timeout for receiving one frame in full, from its first byte."""
    write_timeout_ms: int = 30_000
    """The connection to a peer that accepts no byte for this long, while bytes wait to be sent, is
    closed (at most `idle_timeout_ms`)."""
    idle_timeout_ms: int = 30_000
    """The connection to a peer that sends nothing for this long, not even a keepalive, is
    closed."""
    keepalive_ms: int = 5_000
    """Interval at which a keepalive is sent on an idle connection."""

    # time
    retain_history_ms: int = 3_600_000
    """Distance of a shard's since behind its upper, unless the object sets its own."""
    index_history_ms: int = 60_000
    """History that an index keeps for reads; older times are read from the shard."""
    oracle_reserve_ms: int = 5_000
    """Range of write timestamps that is reserved durably ahead of use."""
    peek_deadline_ms: int = 30_000
    """Deadline of a read, unless the read sets its own."""
    query_deadline_ms: int = 300_000
    """Deadline of a query's result, unless the query sets its own."""
    replace_deadline_ms: int = 60_000
    """Deadline for a replacement view to catch up with the view that it replaces."""
    queries_in_flight_max: int = 4
    """Maximum number of queries that Spark runs for clients at a time; more wait."""
    queries_waiting_max: int = 256
    """Maximum number of queries that wait to run; more are refused with `ResourceBusy`."""
    query_engine: str = "auto"
    """The Spark that runs queries and serves Spark Connect clients. `own`: a separate one, started
    at the first query. `shared`: the one of the views, which a query can bring down. `auto`: `own`
    if the machine has twice the memory of both heaps."""
    query_engine_memory: str = ""
    """Heap of the separate query Spark; empty: the same as `spark_driver_memory`."""
    query_disk_bytes_max: int = 16 * 1024 * 1024 * 1024
    """Disk space for the query engine's results, spills and shuffles; beyond it the running queries
    fail with `JobTooLarge`."""
    group_commit_ms: int = 0
    """Time for which the first write of a group waits for others. Writes that arrive during a
    commit form the next group in any case, so concurrent writers share groups even with 0."""
    hold_downgrade_ms: int = 1_000
    """Interval at which read holds are advanced."""
    clock_tick_ms: int = 1_000
    """Interval at which idle tables are sealed while a view over them depends on the clock."""
    maintenance_ms: int = 250
    """Interval at which workers merge the runs of their indexes and delete stale results, and the
    service compacts one shard that has grown."""
    reclaim_ms: int = 60_000
    """Interval at which space is reclaimed from shards that do not grow, and from their history."""

    # storage
    part_bytes_target: int = 64 * 1024 * 1024
    """Target size of a part."""
    inline_part_bytes_max: int = 16 * 1024
    """Parts up to this size are stored inline in the shard's document."""
    inline_bytes_per_shard_max: int = 128 * 1024
    """Maximum number of bytes of all inline parts of one shard."""
    state_bytes_max: int = 256 * 1024
    """Size of a shard's document; close to it, appends wait for compaction."""
    part_list_parts_min: int = 16
    """A batch of at least this many parts is described in a separate blob instead of the shard's
    document."""
    part_statistics_bytes_max: int = 1024
    """Size of a part's statistics (minimum and maximum of columns) in the shard's document."""
    filter_parts: bool = True
    """Lets a view skip parts of its inputs whose statistics show that they hold no row for it."""
    filter_audit_one_in: int = 100
    """One in this many skipped parts is read anyway, to verify the filter."""
    decoded_parts_bytes_max: int = 32 * 1024 * 1024
    """Size of the cache of decoded or just written parts, for readers at about the same time."""
    batches_per_shard_max: int = 24
    """A shard with more batches than this is compacted."""
    reader_lease_ms: int = 900_000
    """A reader's lease expires when it is not renewed for this long."""
    blob_orphan_grace_ms: int = 600_000
    """Time for which a blob that no document names is kept, from when the service first sees it."""

    backup_blobs_in_flight_max: int = 4
    """Maximum number of blobs that a backup or restore copies at a time; each is in memory while it
    is copied."""

    # external stores: files, buckets, PostgreSQL
    blob_url: str = ""
    """URL of the store for shards' parts (`actors.durable.persist.store_urls`); empty: in the state
    directory."""
    consensus_url: str = ""
    """URL of the store for documents, which is everything else durable; empty: in the state
    directory."""
    store_request_timeout_ms: int = 15_000
    """Timeout of one request to a bucket, and of one PostgreSQL transaction."""
    store_request_retries_max: int = 3
    """Maximum number of retries of one idempotent request."""
    disk_timeout_ms: int = 60_000
    """Timeout of one operation on local files, and of one SQLite transaction."""
    store_poll_ms: int = 500
    """Interval at which a shared store is polled if it sends no notifications."""
    standby: bool = False
    """Makes the service wait, before it starts, until no other service owns its stores."""
    heartbeat_ms: int = 500
    """Interval at which the owner of shared stores writes its heartbeat, and at which a standby
    checks it."""
    takeover_ms: int = 3_000
    """A standby takes over when it has seen no heartbeat for this long."""
    store_requests_in_flight_max: int = 32
    """Maximum number of requests of one process to one bucket at a time; more wait."""
    store_bytes_in_flight_max: int = 128 * 1024 * 1024
    """Maximum number of bytes of objects that one process reads from or writes to one bucket at a
    time; a larger object is transferred alone."""

    # dataflows
    inflight_bytes_per_dataflow_max: int = 64 * 1024 * 1024
    """Maximum number of bytes of its inputs' parts that a dataflow has fetched, or is about to, and
    not yet committed."""
    fetches_in_flight_max: int = 8
    """Maximum number of fetches of one fetch task at a time."""
    fetch_attempts_max: int = 5
    """Maximum number of attempts to read one part, or to list a shard, while the store fails; then
    the input freezes."""
    described_in_flight_max: int = 16
    """Maximum number of descriptions that a listen task may send ahead of its consumer's grants."""
    hydration_chunk_bytes: int = 128 * 1024 * 1024
    """A view of projections, filters and UNION ALL is hydrated in chunks of about this size of the
    inputs' parts, with a checkpoint after each."""
    lookup_rows_max: int = 200_000
    """A step that would look up more rows than this in one arrangement scans the shard in Spark
    instead."""
    step_pairs_max: int = 20_000_000
    """A step over several timestamps whose changes would form more pairs with matching rows than
    this is halved. A step of one timestamp cannot be split."""
    arrangement_lag_bytes_max: int = 256 * 1024 * 1024
    """Maximum number of bytes of a shared arrangement that one lagging dataflow may keep from being
    compacted. Beyond this, the dataflow continues alone on its own arrangement."""
    arrangement_slack_ms: int = 1_000
    """Distance of a shared arrangement's since behind its users, so that new dataflows can join."""
    eager_aggregation_rows_min: int = 1_000
    """A view sums a table before joining it to another if the table has at least this many rows for
    each row of the other when the view is created. Each change of the table then maintains one more
    state."""
    hidden_rows_whole_max: int = 2_000
    """Hidden aggregate state of up to this many groups is read in full by a step, which saves a
    stratum."""
    hydrations_max: int = 4
    """Maximum number of dataflows that hydrate at a time; more wait, suspended."""
    retry_delay_ms_min: int = 50
    """Delay before the first retry of a failed operation; it doubles with each failure."""
    retry_delay_ms_max: int = 10_000
    """Maximum delay between two retries."""
    result_bytes_max: int = 48 * 1024 * 1024
    """Size of the rows in one response. A larger batch of a subscribe goes through the stash; a
    peek fails if one of its rows is larger."""
    inline_bytes_max: int = 4 * 1024 * 1024
    """Size of one worker's share of a peek's result, and of a subscribe's snapshot. Larger ones go
    through the stash, in pieces of this size."""
    stash_orphan_ms: int = 600_000
    """A stashed result or batch that nobody has read after this long is deleted."""
    subscribe_inflight_bytes_max: int = 16 * 1024 * 1024
    """Maximum number of bytes of changes sent to a subscriber that it has not accepted yet."""
    subscribe_idle_ms: int = 60_000
    """A subscriber that reads nothing for this long, while batches wait for it, is disconnected."""
    log_rows_max: int = 1024
    """Number of past steps, and of past engine jobs, that the service's relations show."""

    # sources
    source_dirs: str = ""
    """Folders from which sources and copies may read files, separated by `:` (Windows: `;`); empty:
    none."""
    secret_env_prefix: str = "PENSTOCK_SECRET_"
    """A source may read its password only from environment variables with this prefix, because the
    user who creates a source chooses where the password is sent."""
    secret_dir: str = ""
    """Folder below which sources may read passwords and keys from files; empty: none."""
    source_weak_passwords: bool = False
    """Lets a source send its password to a PostgreSQL server that requests it in clear text or as
    MD5 without verified TLS. Otherwise only SCRAM is used there."""
    source_buckets: tuple[str, ...] = ()
    """URLs at or below which sources and copies may read (s3://bucket/prefix, gs://…,
    az://container/…); empty: none. As text: separated by commas."""
    source_spool_bytes_max: int = 4 * 1024 * 1024 * 1024
    """Maximum number of bytes of bucket objects that one source or copy keeps on local disk at a
    time. A larger object cannot be read."""
    file_decoded_bytes_max: int = 1024 * 1024 * 1024
    """Decoded size of one file of a source or copy, and of what is decoded of it at a time; or a
    hundred times the size of the file, if that is more. A larger file stops its source."""
    file_record_bytes_max: int = 32 * 1024 * 1024
    """Length of one line of CSV or JSON, or of a JSON file that is read as one record."""
    source_tick_ms: int = 1_000
    """Interval at which the shards of an idle source are sealed up to the present."""
    statistics_ms: int = 1_000
    """Interval at which sources and sinks report their statistics."""
    source_inflight_bytes_max: int = 32 * 1024 * 1024
    """Maximum number of bytes of one source's rows that have been read and are not durable yet. A
    larger transaction is written as parts before it ends."""

    # copies from files
    copy_parts_max: int = 4_096
    """Maximum number of parts of one copy into a table; each holds about
    `source_inflight_bytes_max` of rows."""
    copy_keyed_rows_max: int = 1_000_000
    """Maximum number of rows of one copy into a table with a PRIMARY KEY; their keys are looked up
    when the copy is appended."""

    # copies into files
    copy_dir: str = ""
    """Folder below which copies are written; empty: `copies` in the state directory."""
    copy_buckets: tuple[str, ...] = ()
    """URLs at or below which copies may be written (s3://bucket/prefix, gs://…, az://container/…);
    empty: none. As text: separated by commas."""
    copies_max: int = 4
    """Maximum number of copies of all clients at a time. The limit applies to copies into files and
    to copies from files separately; more are refused with `ResourceBusy`."""
    copy_request_timeout_ms: int = 30_000
    """Timeout of one request to a bucket by a copy, source or sink."""
    copy_request_retries_max: int = 4
    """Maximum number of retries of one such request that failed or got no answer. Then the copy
    fails, and a source or sink restarts."""

    # sinks
    sink_dir: str = ""
    """Folder below which sinks may write; empty: none."""
    sink_buckets: tuple[str, ...] = ()
    """URLs at or below which sinks may write (s3://bucket/prefix, gs://…, az://container/…); empty:
    none. As text: separated by commas."""
    sink_commit_ms: int = 1_000
    """Shortest interval between two commits of a sink."""
    sink_bytes_max: int = 64 * 1024 * 1024
    """Approximate size of one commit of a sink; a larger batch of the shard is committed as a
    whole."""
    sink_frontier_ms: int = 60_000
    """Interval at which a sink advances its upper while nothing changes."""
    sink_deadline_ms: int = 60_000
    """Deadline of one blocking call of a sink; after it the sink restarts."""

    # engine
    spark_master: str = "local[*]"
    """Spark master URL, for example local[*]."""
    spark_driver_memory: str = "2g"
    """Heap of the Spark driver, in Spark's notation."""
    spark_conf: dict[str, str] = {}
    """Spark settings to add to Penstock's own."""
    engine_environment: tuple[str, ...] = ()
    """Additional variables of the service's environment that Spark and users' functions may see.
    Those that Spark, Java, Python and the blob store need are always passed. A name ending in `*`
    matches a prefix. As text: separated by commas."""
    engine_start_timeout_ms: int = 120_000
    """Timeout for starting the engine."""
    engine_jobs_in_flight_max: int = 16
    """Maximum number of jobs that an engine runs at a time."""
    engine_spare_tasks_max: int = 8
    """Maximum number of tasks that a `local` Spark runs beyond its cores, for jobs that wait behind
    endless ones."""
    engine_queue_max: int = 1024
    """Maximum number of jobs that wait for the engine; more are refused with `ResourceBusy`."""
    engine_disk_bytes_max: int = 0
    """Disk space for an engine's results, spills and shuffles; beyond it the queries that run there
    fail with `JobTooLarge`. 0: no limit."""
    engine_niceness: int = 0
    """Niceness of the engine's processes, as for nice(1)."""
    engine_inline_bytes_max: int = 8 * 1024 * 1024
    """Rows larger than this go to the engine as a file; a job with fewer runs in
    one partition."""
    engine_part_copies: bool = False
    """Copies large parts from the bucket to local scratch for Spark. For a Spark that sees the
    state directory but cannot reach the bucket."""
    engine_shuffle_partitions_max: int = 1_000
    """Maximum number of shuffle partitions of a large job on a cluster. It uses as many as Spark
    has cores, at least two; Spark coalesces small ones at run time."""
    engine_collected_bytes_max: int = 32 * 1024 * 1024
    """A step may read this much for a result that Spark's driver collects. Beyond it, rows that no
    grouping reduces are written to files, and so are results with more rows than fit into twice
    this size."""
    engine_plan_nodes_max: int = 400
    """Maximum number of nodes of one Spark plan for strata that run together; larger plans are
    split."""
    view_plan_nodes_max: int = 8_000
    """Maximum number of nodes of all plans of a step in which every input changes; a view that
    needs more is recomputed."""
    engine_attempts_max: int = 2
    """A job during which the engine dies this often, with no other job running, fails with
    `JobTooLarge`."""
    engine_killer_retry_ms_min: int = 60_000
    """Delay before a job that failed with `JobTooLarge` is retried once, alone, together with its
    view. It doubles each time the job kills the engine again."""
    engine_killer_retry_ms_max: int = 3_600_000
    """Maximum to which `engine_killer_retry_ms_min` doubles."""
    prepared_plans_max: int = 128
    """Prepared step plans that the engine keeps for all dataflows. Each takes about 0.6 MB of the
    driver's heap for every input that it reads."""
    prepared_plans_per_dataflow_max: int = 16
    """Prepared step plans that the engine keeps for one dataflow."""
    prepared_slot_bytes_max: int = 32 * 1024 * 1024
    """Size of one input of a prepared step, as Arrow; a step with a larger input is planned from
    scratch."""

    # the gateway for clients of Spark Connect; see `actors.doors.connect_gateway`
    connect_listen: str = ""
    """Address of the Spark Connect gateway: host:port (port 0 picks a free one); empty: none."""
    connect_connections_max: int = 256
    """Maximum number of connections of Spark Connect clients that have authenticated, at a time."""
    connect_sessions_max: int = 64
    """Spark Connect sessions at a time; more are refused with `ResourceBusy`."""
    connect_session_idle_ms: int = 3_600_000
    """A session that requests and runs nothing for this long is released."""
    connect_operations_max: int = 16
    """Maximum number of unfinished operations of all Spark Connect clients; more are refused with
    `ResourceBusy`."""
    connect_streams_max: int = 16
    """Streaming queries of all Spark Connect clients; more are refused with `ResourceBusy`."""
    connect_detached_ms: int = 300_000
    """An operation without an attached client for this long is abandoned."""
    connect_kept_max: int = 20_000
    """Latest sessions and operations that changed something and are remembered, so that a resent
    one is not repeated."""
    connect_message_bytes_max: int = 128 * 1024 * 1024
    """Size of one message from or to a Spark Connect client."""
    connect_bodies_bytes_max: int = 512 * 1024 * 1024
    """Maximum number of bytes of all messages of Spark Connect clients that are being received or
    executed. More messages wait; those that wait too long are refused with `ResourceBusy`."""
    connect_inline_bytes_max: int = 8 * 1024 * 1024
    """Rows up to this size go to Spark inside a plan; larger contents are read by
    Spark from the shard's files."""

    # authentication of peers; see `actors.runtime.transport.security`
    identity: str = ""
    """The service's name. On a client: the expected name of the service. If both are set, they must
    be equal."""
    tls_certificate: str = ""
    """PEM file of this side's certificate. Together with `tls_key` and `tls_authority` it enables
    mutual TLS 1.3."""
    tls_key: str = ""
    """PEM file of the certificate's private key."""
    tls_authority: str = ""
    """PEM file of the authority that must have signed the certificates of both sides."""
    token_file: str = ""
    """File of bearer tokens, one a line. A service accepts all of them, a client sends the first;
    empty: no tokens."""
    cluster_token_file: str = ""
    """Like `token_file`, but for the replica protocol."""

    # roles and rights; see `actors.control.access`
    roles_required: bool = False
    """Makes clients of the PostgreSQL protocol and of Spark Connect log in as a role even while no
    role can log in."""
    roles_max: int = 1_000
    """Number of roles."""
    roles_bytes_max: int = 4 * 1024 * 1024
    """Size of the document that holds all roles and their rights."""
    role_tokens_max: int = 16
    """Maximum number of tokens of one role."""
    pg_cleartext_passwords: bool = False
    """Has PostgreSQL clients send their password in clear text inside TLS, for clients without
    SCRAM. Without TLS they use SCRAM regardless."""
    audit_statements: bool = False
    """Logs every statement of SQL and Spark Connect clients to `penstock.audit`."""
    audit_text_characters_max: int = 4_096
    """Maximum number of characters of a statement in a line of the audit log."""

    # the WAL's acceptor; see `actors.wal`
    wal_listen: str = "127.0.0.1:5454"
    """Address of `penstock wal serve` for proposers and readers of the log: host:port."""
    wal_dir: str = "wal"
    """Folder of the acceptor's timelines, one subfolder each: tenant/timeline."""
    wal_node_id: int = 1
    """Number of this acceptor, unique among the acceptors of a log."""
    wal_jwt_keys: str = ""
    """Public Ed25519 keys whose owners may sign tokens for acceptors: a PEM file, or a folder of
    them. Signed tokens are accepted in addition to those of `token_file`; empty: none are."""
    wal_jwt_tenants_only: bool = False
    """Accepts signed tokens only if they are for a single tenant."""
    wal_messages_max: int = 256
    """Maximum number of messages of one proposer that have been read but are not in the log yet; at
    the limit its socket is not read."""
    wal_replies_max: int = 16
    """Maximum number of replies to one proposer that are not written to its socket yet; at the
    limit its messages wait."""
    wal_idle_timeout_ms: int = 600_000
    """The connection to a peer that sends nothing for this long is closed."""
    wal_save_ms: int = 300
    """Interval at which a timeline whose positions moved is checked for whether to save them."""
    wal_control_age_ms: int = 300_000
    """Positions that moved are saved at the latest after this long."""

    wal_peers: str = ""
    """The other acceptors of its logs, as host:port,host:port; empty: the members that each
    timeline's configuration names."""
    wal_blob_url: str = ""
    """URL of a store for complete, committed segments (`actors.durable.persist.store_urls`); empty:
    segments are kept only here, and never removed."""
    wal_keep_bytes: int = 1024 * 1024 * 1024
    """Length of the log before the commit LSN that stays on local disk after it was offloaded to
    `wal_blob_url`. Older segments are removed, even if consumers have not read them; those are then
    read from the store."""
    wal_offload_ms: int = 1_000
    """Interval at which timelines are checked for segments to offload."""
    wal_offload_turn_ms: int = 5_000
    """An acceptor waits this long for each acceptor before it to offload a segment; then it
    offloads the segment itself."""
    wal_blob_timeout_ms: int = 60_000
    """Timeout for writing one segment and reading it back, or for reading one."""

    # the WAL's proposers: `penstock wal push`, `relay`
    wal_heartbeat_ms: int = 1_000
    """A proposer sends an acceptor an empty message this long after the last one."""
    wal_silence_ms: int = 10_000
    """A proposer reconnects to an acceptor whose message is overdue by this long."""

    # the process
    pin_cores: bool = False
    """Pins the service's threads to one core and the engine's to the others. The log shows
    which."""
    expiration_ms: int | None = None
    """The service stops this long after its start; None: never."""

    # monitoring
    otlp: str = ""
    """Base URL of a receiver of traces (Jaeger: port 4318); empty: as OpenTelemetry's environment
    variables say."""
    trace_file: str = ""
    """File to which traces are appended as well; `penstock trace` draws them."""
    metrics_listen: str = ""
    """host:port of the pages for monitoring: metrics, health and readiness; empty: none."""
    http_connections_max: int = 32
    """Maximum number of simultaneous connections to the monitoring pages; one more closes the one
    that has waited longest."""

    # stopping
    shutdown_deadline_ms: int = 15_000
    """Timeout for a graceful stop; then the remaining actors are cancelled."""

    @property
    def piece_bytes_max(self) -> int:
        """Return the size of one piece of a stashed result."""
        return min(self.inline_bytes_max, self.result_bytes_max)

    def engine_killer_retry_ms(self, kills: int) -> int:
        """Return the delay before a job is retried that has killed the engine `kills` times."""
        return backoff_ms(kills, self.engine_killer_retry_ms_min, self.engine_killer_retry_ms_max)

    def retry_delay_ms(self, failures: int) -> int:
        """Return the delay after this many failures in a row (from 1); it doubles with each."""
        return backoff_ms(failures, self.retry_delay_ms_min, self.retry_delay_ms_max)

    def _standby_relations(self) -> list[tuple[bool, str]]:
        return [
            (
                not self.standby or bool(self.consensus_url),
                "standby needs consensus_url: a store that the services share, such as PostgreSQL",
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
                f"unproven_bytes_max must be between {UNPROVEN_BYTES_MIN} and "
                f"{UNPROVEN_BYTES_MAX}: enough for a login, and little more",
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
            " service can reach, such as postgresql:// and s3:// (on one machine also sqlite: and"
            " file:)"
        )
        urls = (self.consensus_url, self.blob_url)
        relations = [
            (all(urls) and not any(url.lower().startswith("mem:") for url in urls), shared),
            (
                self.replicas == 1,
                f"role = {self.role} cannot be combined with replicas = {self.replicas}: run each"
                " replica as a separate process, with penstock serve --role replica",
            ),
        ]
        if self.role == "replica":
            relations += [
                (
                    bool(self.cluster_listen),
                    "role = replica needs cluster_listen: the address at which a controller"
                    " connects, for example 10.0.0.2:6875",
                ),
                (not self.standby, "standby is only for a controller: all replicas run"),
                (
                    not (self.pg_listen or self.connect_listen),
                    "pg_listen and connect_listen are only for a controller: a replica serves no"
                    " clients",
                ),
            ]
        else:
            relations.append(
                (
                    not (self.cluster_listen or self.storage_listen or self.cluster_advertise),
                    "cluster_listen, storage_listen and cluster_advertise are only for a replica: a"
                    " controller connects to it",
                )
            )
        return relations

    def _wal_relations(self) -> list[tuple[bool, str]]:
        return [
            (
                self.wal_messages_max >= 8 and self.wal_replies_max >= 2,
                "wal_messages_max must be at least 8 and wal_replies_max at least 2: half of each "
                "is processed while the other half waits",
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
                f"source_dirs: {folder!r} must be an absolute path (separate several with "
                f"{os.pathsep!r})",
            )
            for folder in self.source_dirs.split(os.pathsep)
        ]
        relations += [
            (
                ENVIRONMENT_NAME.fullmatch(name) is not None,
                f"engine_environment: {name!r} must be the name of a variable, or a prefix with a "
                "star such as MY_*",
            )
            for name in self.engine_environment
        ]
        return relations

    def _check_spark_conf(self) -> None:
        # With substitution on, any user's SQL text could read the engine's environment variables.
        name = "spark.sql.variable.substitute"
        value = self.spark_conf.get(name, "false")
        if value.strip().lower() != "false":
            raise BadSettings(
                f"spark_conf: {name} = {value}: must be false, because SQL texts must not read the "
                "engine's environment"
            )

    def _check_numbers(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 0 if name in MAY_BE_ZERO else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise BadSettings(f"{name} = {value}: must be greater than zero")

    def check(self) -> None:
        """Raise `BadSettings` if a setting is out of range or two contradict each other."""
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
                "a result must fit into a frame",
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
                "cluster_listen and storage_listen need replicas = 1: they serve a single replica",
            ),
        ]
        relations += self._list_relations()
        for holds, text in relations:
            if not holds:
                raise BadSettings(text)


_FLAGS: Final = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
"""Spellings of a Boolean setting, case-insensitive."""


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Load settings from defaults, a TOML file, the environment and flags, in rising precedence.

    Raises `BadSettings`, which names the file or setting that is invalid.
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
            raise BadSettings(f"unknown setting {name!r}{nearest_hint(name, fields)}")
        if fields[name].type is bool:
            values[name] = _FLAGS.get(str(values[name]).lower(), values[name])
    for name in LIST_SETTINGS:
        if isinstance(values.get(name), str):
            values[name] = [each for each in values[name].split(",") if each]
    try:
        # Not strict: the environment and flags give every value as text.
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise BadSettings(f"settings: {error}") from None
    settings.check()
    return settings

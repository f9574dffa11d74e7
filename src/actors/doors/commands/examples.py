"""Example command lines, shown at the end of each command's ``--help``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

_TIMELINE: Final = (
    "--tenant 0123456789abcdef0123456789abcdef --timeline fedcba9876543210fedcba9876543210"
)
EXAMPLES: Final[dict[str, tuple[str, str]]] = {
    "actors": ("penstock actors", "penstock actors --interval 10 --json"),
    "backup": (
        "penstock backup s3://backups/penstock --state-dir /var/lib/penstock",
        "penstock backup /mnt/backups --list",
    ),
    "check-views": (
        "penstock check-views views/ --splits 3",
        "penstock check-views late.view --seed 7 --json report.json",
    ),
    "copy-from": (
        "penstock copy-from flights /data/flights.csv --format csv --option header=true",
        "penstock copy-from flights s3://data/flights --format parquet --recursive",
    ),
    "copy-to": (
        "penstock copy-to late exports/late --format csv",
        "penstock copy-to late s3://exports/late --format parquet --overwrite",
    ),
    "demo": ("penstock demo", "penstock demo --speed 600 --days 3 --plain"),
    "explain": ("penstock explain late", "penstock explain late --connect 127.0.0.1:6875"),
    "insert": (
        "penstock insert flights flights.jsonl",
        "penstock insert flights < flights.jsonl",
    ),
    "java": ("penstock java", "penstock java --archive"),
    "peek": (
        "penstock peek late --filter carrier=UA --limit 10",
        "penstock peek late --as-of 1700000000000 --json",
    ),
    "query": (
        "penstock query 'SELECT carrier, count(*) FROM flights GROUP BY carrier'",
        "penstock query 'SELECT * FROM late' --as-of 1700000000000 --json",
    ),
    "relations": ("penstock relations", "penstock relations --connect 127.0.0.1:6875"),
    "replicas": (
        "penstock replicas",
        "penstock replicas --add r2=10.0.0.7:6876",
    ),
    "restore": (
        "penstock restore s3://backups/penstock --state-dir /var/lib/penstock",
        "penstock restore /mnt/backups --backup 20260101T000000Z --state-dir /var/lib/penstock",
    ),
    "serve": (
        "penstock serve --state-dir /var/lib/penstock --set pg_listen=127.0.0.1:5433",
        "penstock serve --config penstock.toml --standby",
    ),
    "sessions": ("penstock sessions", "penstock sessions --end 12"),
    "shard compact": (
        "penstock shard compact flights --state-dir /var/lib/penstock",
        "penstock shard compact u1 --blob-url s3://data/blobs --consensus-url s3://data/consensus",
    ),
    "shard gc": (
        "penstock shard gc --state-dir /var/lib/penstock --dry-run",
        "penstock shard gc --state-dir /var/lib/penstock --grace-ms 3600000",
    ),
    "shard inspect": (
        "penstock shard inspect flights --state-dir /var/lib/penstock",
        "penstock shard inspect u1 --state-dir /var/lib/penstock --json",
    ),
    "shard list": (
        "penstock shard list --state-dir /var/lib/penstock",
        "penstock shard list --blob-url s3://data/blobs --consensus-url s3://data/consensus --json",
    ),
    "shard release": (
        "penstock shard release late nightly --state-dir /var/lib/penstock",
        "penstock shard release u7 nightly --state-dir /var/lib/penstock",
    ),
    "shard verify": (
        "penstock shard verify --state-dir /var/lib/penstock",
        "penstock shard verify flights late --state-dir /var/lib/penstock --json",
    ),
    "simulate": ("penstock simulate --seed 7", "penstock simulate --sources"),
    "source forget": (
        "penstock source forget shop",
        "penstock source forget shop --connect 127.0.0.1:6875",
    ),
    "sql": (
        "penstock sql",
        "penstock sql -c 'CREATE MATERIALIZED VIEW late AS SELECT * FROM flights WHERE delay > 15'",
    ),
    "status": ("penstock status", "penstock status --watch 5"),
    "subscribe": (
        "penstock subscribe late",
        "penstock subscribe late --resume 1700000000000 --progress --json",
    ),
    "trace": ("penstock trace traces.jsonl", "penstock trace traces.jsonl --search commit"),
    "tracing": ("penstock tracing", "penstock tracing --ratio 0.1"),
    "version": ("penstock version", "penstock --version"),
    "wal inspect": (
        "penstock wal inspect /var/lib/penstock-wal/000000010000000000000001.partial",
        f"penstock wal inspect 000000010000000000000001 --blob-url s3://logs {_TIMELINE}",
    ),
    "wal push": (
        f"penstock wal push a:5454,b:5454,c:5454 changes.jsonl {_TIMELINE}",
        f"penstock wal push 127.0.0.1:5454 {_TIMELINE} < changes.jsonl",
    ),
    "wal relay": (
        f"penstock wal relay a:5454,b:5454 postgresql://replicator@db --slot penstock {_TIMELINE}",
        f"penstock wal relay 127.0.0.1:5454 postgresql://db --create-slot {_TIMELINE}",
    ),
    "wal serve": (
        "penstock wal serve --dir /var/lib/penstock-wal --node-id 1",
        "penstock wal serve --dir /var/lib/penstock-wal --node-id 1 --peers b:5454,c:5454",
    ),
    "wal status": (
        f"penstock wal status --connect 127.0.0.1:5454 {_TIMELINE}",
        "penstock wal status --dir /var/lib/penstock-wal --json",
    ),
}
"""Maps each command, such as "shard list", to two example command lines."""


def add_examples(app: typer.Typer) -> None:
    """Append its examples to the help of every command. Raises `KeyError` if a command has
    none."""
    for words, info in _commands(app, ""):
        # \b tells click not to rewrap the lines.
        info.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[words])


def _commands(app: typer.Typer, before: str) -> Iterator[tuple[str, CommandInfo]]:
    for info in app.registered_commands:
        assert info.callback is not None
        name = info.name or get_command_name(info.callback.__name__)
        yield before + name, info
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(group.typer_instance, f"{before}{group.name} ")

"""Formats reports about shards, as JSON and as readable lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from actors.runtime.progress import EMPTY, Frontier

if TYPE_CHECKING:
    from actors.durable.persist.orphans import GarbageBlob
    from actors.durable.persist.shard import BatchPart, ShardBatch, ShardState
    from actors.durable.persist.verify import VerifiedShard

SHOWN_MAX: Final = 200
"""Maximum number of printed lines of one kind. JSON output has them all."""


def size_text(count: int) -> str:
    """Format a number of bytes in readable units.

    >>> size_text(2048), size_text(12)
    ('2.0 KiB', '12 B')
    """
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count} B"


def _span(ms: int) -> str:
    return f"{ms / 1000:.1f} s" if ms < 120_000 else f"{ms / 60_000:.0f} min"


def _frontier(upper: Frontier) -> int | None:
    return None if upper >= EMPTY else upper


def _shown(time: int | None) -> str:
    return "empty" if time is None else str(time)


def shard_summary(state: ShardState, upper: Frontier, of: str | None) -> dict[str, Any]:
    """Return one shard's summary; its `upper` is None for the empty frontier."""
    parts = [part for batch in state.batches for part in batch.parts]
    return {
        "shard": state.id,
        "object": of,
        "since": state.since,
        "upper": _frontier(upper),
        "batches": len(state.batches),
        "parts": len(parts),
        "rows": sum(part.rows for part in parts),
        "bytes": sum(part.bytes for part in parts),
        "retired": len(state.retired),
    }


def summary_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line of headings, then one line for each shard."""
    yield _cells("shard", "object", "since", "upper", "parts", "rows", "bytes")
    for row in rows:
        of = row["object"] or "-"
        # A damaged document does not end the list: its error takes one line.
        if "error" in row:
            yield f"{row['shard']:<28} {of:<28} {row['error']}"
            continue
        upper = _shown(row["upper"])
        size = size_text(row["bytes"])
        yield _cells(row["shard"], of, row["since"], upper, row["parts"], row["rows"], size)


def _cells(*cells: object) -> str:
    shard, of, *numbers = map(str, cells)
    widths = (15, 15, 6, 12, 11)
    shown = " ".join(f"{cell:>{width}}" for cell, width in zip(numbers, widths, strict=True))
    return f"{shard:<28} {of:<28} {shown}"


def shard_details(
    state: ShardState, upper: Frontier, of: str | None, document: tuple[int, int], now_ms: int
) -> dict[str, Any]:
    """Return the contents of a shard's document, except the bytes of inline parts.

    `document`: the document's size in bytes, stored and unpacked.
    """
    return shard_summary(state, upper, of) | {
        "table": state.tables,
        "own_upper": _frontier(state.upper),
        "seqno": state.seqno,
        "document_bytes": document[0],
        "document_unpacked_bytes": document[1],
        "inline_bytes": state.inline_bytes,
        "columns": state.schema.ddl(),
        "key": list(state.schema.key),
        "contents": [_batch(batch) for batch in state.batches],
        "holds": dict(sorted(state.holds.items())),
        "leases": {
            name: {
                "since": lease.since,
                "seqno": lease.seqno,
                "expires_in_ms": lease.expires_ms - now_ms,
            }
            for name, lease in sorted(state.leases.items())
        },
        "writers": {
            name: {"call": mark.call, "seqno": mark.seqno}
            for name, mark in sorted(state.writers.items())
        },
        "retired_blobs": [{"key": gone.key, "seqno": gone.seqno} for gone in state.retired],
    }


def _batch(batch: ShardBatch) -> dict[str, Any]:
    return {
        "lower": batch.lower,
        "upper": _frontier(batch.upper),
        "bytes": batch.bytes,
        "list": None if batch.listed is None else batch.listed.key,
        "parts": [_part(part) for part in batch.parts],
    }


def _part(part: BatchPart) -> dict[str, Any]:
    described: dict[str, Any] = {
        "key": part.key or None,
        "rows": part.rows,
        "bytes": part.bytes,
        "checksum": f"{part.checksum:08x}",
        "time_min": part.time_min,
        "time_max": part.time_max,
        "retracts": part.retracts,
        "errors": part.has_errors,
        "version": part.version,
    }
    # Parts of earlier versions have no statistics.
    columns = getattr(part, "statistics", ())
    if columns:
        described["statistics"] = {
            one.column: {"nulls": one.nulls, "low": _plain(one.low), "high": _plain(one.high)}
            for one in columns
        }
    return described


def _plain(value: object) -> object:
    # Bounds of binary columns are bytes, which JSON cannot represent.
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def detail_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the printed lines of a report that `shard_details` made."""
    kind = " (table)" if report["table"] else ""
    yield f"shard {report['shard']}: {report['object'] or 'not named by the catalog'}{kind}"
    yield f"  columns   {report['columns']}"
    if report["key"]:
        yield f"  key       {', '.join(report['key'])}"
    upper = _shown(report["upper"])
    if report["own_upper"] != report["upper"]:
        upper += f" (its own {_shown(report['own_upper'])})"
    yield f"  since     {report['since']}"
    yield f"  upper     {upper}"
    document, unpacked = (
        size_text(report[size]) for size in ("document_bytes", "document_unpacked_bytes")
    )
    yield f"  seqno     {report['seqno']}; document of {document}, {unpacked} unpacked"
    yield (
        f"  contents  {report['rows']} rows, {size_text(report['bytes'])} in"
        f" {report['parts']} parts in {report['batches']} batches;"
        f" {size_text(report['inline_bytes'])} inline"
    )
    yield from _cut(_batch_lines(report["contents"]), "more: --json shows all")
    yield from _section("holds", (f"{n}  at {t}" for n, t in report["holds"].items()))
    yield from _section("leases", (_lease(n, held) for n, held in report["leases"].items()))
    writers = report["writers"].items()
    yield from _section(
        "writers", (f"{n}  call {w['call']}, seqno {w['seqno']}" for n, w in writers)
    )
    gone = (f"{one['key']}  since seqno {one['seqno']}" for one in report["retired_blobs"])
    yield from _section("retired blobs", gone)


def _batch_lines(contents: Sequence[dict[str, Any]]) -> Iterator[str]:
    for batch in contents:
        lower, upper = batch["lower"], batch["upper"]
        interval = f"[{lower}, {'…' if upper is None else upper})"
        listed = f" in part list {batch['list']}" if batch["list"] else ""
        count = f"{len(batch['parts'])} parts{listed}"
        yield f"  batch {interval}  {size_text(batch['bytes'])}, {count}"
        for part in batch["parts"]:
            marks = [mark for mark in ("retracts", "errors") if part[mark]]
            yield (
                f"    {part['key'] or 'inline'}  {part['rows']} rows, {size_text(part['bytes'])},"
                f" times {part['time_min']} to {part['time_max']}"
                + "".join(f", {mark}" for mark in marks)
            )
            for column, known in part.get("statistics", {}).items():
                yield (
                    f"      {column}: {_bound(known['low'])} to {_bound(known['high'])},"
                    f" {'?' if known['nulls'] is None else known['nulls']} NULLs"
                )


def _bound(value: object) -> str:
    return "?" if value is None else repr(value)


def _lease(name: str, held: dict[str, Any]) -> str:
    left = held["expires_in_ms"]
    expires = f"expires in {_span(left)}" if left > 0 else f"expired {_span(-left)} ago"
    return f"{name}  since {held['since']}, seqno {held['seqno']}, {expires}"


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    found = list(lines)
    if found:
        yield f"  {title}"
        yield from _cut((f"    {line}" for line in found), "more")


def _cut(lines: Iterable[str], more: str) -> Iterator[str]:
    count = 0
    for line in lines:
        count += 1
        if count <= SHOWN_MAX:
            yield line
    if count > SHOWN_MAX:
        yield f"    … {count - SHOWN_MAX} {more}"


def waste_lines(found: Sequence[GarbageBlob], done: str) -> Iterator[str]:
    """Yield one line for each unreferenced blob, then their totals."""

    def line(one: GarbageBlob) -> str:
        stays = f"; kept: {one.kept}" if one.kept else ""
        return f"{one.kind:<8} {one.key}  {size_text(one.bytes)}, {_span(one.age_ms)} old{stays}"

    yield from _cut(map(line, found), "more")
    free = [one for one in found if not one.kept]
    yield (
        f"{len(free)} blobs, {size_text(sum(one.bytes for one in free))}: {done};"
        f" {len(found) - len(free)} kept"
    )


def verified_lines(
    reports: Sequence[VerifiedShard], unnamed: Sequence[GarbageBlob]
) -> Iterator[str]:
    """Yield one line for each verified shard and each fault, then the total."""
    for report in reports:
        faults = len(report.faults)
        yield (
            f"shard {report.shard}: {report.parts} parts, {report.rows} rows,"
            f" {size_text(report.bytes)}; {faults or 'no'} fault{'' if faults == 1 else 's'}"
        )
        for fault in report.faults:
            where = f"batch {fault.batch}, part {fault.part}: " if fault.batch else ""
            yield f"  fault: shard {fault.shard}, {where}{fault.text}"
    if unnamed:
        size = size_text(sum(one.bytes for one in unnamed))
        yield f"{len(unnamed)} blobs, {size}, are unused: `penstock shard gc` deletes them"
    total = sum(len(report.faults) for report in reports)
    yield f"{total} faults" if total else "no faults"

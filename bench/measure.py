"""Reporting of benchmarks: one line per measure, with ours, the peer's and the target."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Measure(msgspec.Struct):
    """One measure. Times are in milliseconds; `ratio` is ours / peer; `target` is the limit of the
    ratio."""

    name: str
    ours: float
    peer: float
    unit: str = "ms"
    target: float | None = None
    missing: str = ""
    """Why the peer has no figure, or ""."""
    most: float | None = None
    """A limit on ours alone, instead of on the ratio."""

    @property
    def ratio(self) -> float:
        """Return ours / peer; less is better."""
        return self.ours / self.peer if self.peer else float("inf")

    @property
    def verdict(self) -> str:
        """Return ``ok``, ``short`` (misses its target), or why there is no peer."""
        if self.most is not None:
            return "ok" if self.ours <= self.most else "short"
        if self.missing:
            return f"no peer: {self.missing}"
        return "ok" if self.target is None or self.ratio <= self.target else "short"

    @property
    def bound(self) -> str:
        """Return the target as text: of the ratio, or of ours."""
        if self.most is not None:
            return f"{self.most:g}{self.unit}"
        return "" if self.target is None else f"{self.target:g}"

    def line(self) -> str:
        """Return the line that a benchmark prints."""
        ours = f"{self.name} ours={self.ours:.1f}{self.unit}"
        if self.missing:
            return f"{ours} {self.verdict}"
        target = f"<={self.bound}" if self.bound else "-"
        return (
            f"{ours} peer={self.peer:.1f}{self.unit} ratio={self.ratio:.3f} "
            f"target={target} {self.verdict}"
        )

    def row(self) -> str:
        """Return the row of RESULTS.md."""
        unit = self.unit.strip()
        ours, peer = (f"{value:.1f} {unit}".rstrip() for value in (self.ours, self.peer))
        ratio = f"{self.ratio:.3f}"
        if self.missing:
            peer = ratio = "–"
        target = f"≤ {self.bound}" if self.bound else "–"
        cells = (self.name, ours, peer, ratio, target, self.verdict)
        return f"| {' | '.join(cells)} |"


class Report:
    """Collects measures, prints each one immediately, and writes JSON at the end."""

    def __init__(self, description: str) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--json", type=Path, help="write the measures to this file")
        parser.add_argument("--quick", action="store_true", help="a smoke run: small and short")
        arguments = parser.parse_args()
        self.quick: bool = arguments.quick
        self._json: Path | None = arguments.json
        self.measures: list[Measure] = []

    def add(self, measure: Measure) -> None:
        """Print and keep a measure."""
        self.measures.append(measure)
        print(measure.line(), flush=True)

    def close(self) -> None:
        """Write the JSON file, if `--json` was given."""
        if self._json is not None:
            self._json.write_bytes(msgspec.json.format(msgspec.json.encode(self.measures)))


def sizes(default: Sequence[int]) -> list[int]:
    """Return the numbers of rows to run with, ascending: those of the environment variable ROWS
    (``ROWS=10000,1000000``), or `default`. Raises `SystemExit` if ROWS is malformed."""
    given = os.environ.get("ROWS", "")
    if not given:
        return sorted(default)
    parts = [part.strip().replace("_", "") for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SystemExit(
            f"invalid ROWS {given!r}: expected numbers of rows, separated by commas, such as 10000"
        )
    return sorted({int(part) for part in parts})


def size_name(rows: int) -> str:
    """Return a number of rows as the names of measures have it: 10k, 1M."""
    for unit, name in ((1_000_000, "M"), (1_000, "k")):
        if rows % unit == 0:
            return f"{rows // unit}{name}"
    return str(rows)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)

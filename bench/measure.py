"""How a benchmark reports: one line a measure, ours beside the peer's, against a target."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Measure(msgspec.Struct):
    """One measure. Times in milliseconds; `ratio` is ours / peer; `target` bounds the ratio."""

    name: str
    ours: float
    peer: float
    unit: str = "ms"
    target: float | None = None

    @property
    def ratio(self) -> float:
        """Ours / peer; less is better."""
        return self.ours / self.peer if self.peer else float("inf")

    def line(self) -> str:
        """The line that a benchmark prints."""
        target = "-" if self.target is None else f"<={self.target:g}"
        verdict = "ok" if self.target is None or self.ratio <= self.target else "short"
        return (
            f"{self.name} ours={self.ours:.1f}{self.unit} peer={self.peer:.1f}{self.unit} "
            f"ratio={self.ratio:.3f} target={target} {verdict}"
        )


class Report:
    """Collects measures, prints each as it comes, writes JSON at the end."""

    def __init__(self, description: str) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--json", type=Path, help="write the measures to this file")
        parser.add_argument("--quick", action="store_true", help="a smoke run: small and short")
        arguments = parser.parse_args()
        self.quick: bool = arguments.quick
        self._json: Path | None = arguments.json
        self.measures: list[Measure] = []

    def add(self, measure: Measure) -> None:
        """Prints and keeps a measure."""
        self.measures.append(measure)
        print(measure.line(), flush=True)

    def close(self) -> None:
        """Writes the JSON file if one was asked for."""
        if self._json is not None:
            self._json.write_bytes(msgspec.json.format(msgspec.json.encode(self.measures)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)

"""Run every benchmark of this folder, one after another, and write RESULTS.md."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from measure import Measure

HERE = Path(__file__).parent
NOT_BENCHMARKS = {
    "corpus_views.py",
    "measure.py",
    "pathway_peer.py",
    "postgres_peer.py",
    "run_all.py",
    "sources_service.py",
    "steady_cluster.py",
}


def main() -> int:
    """Return exit status 1 if a benchmark fails. A figure that misses its target is only
    reported."""
    quick = ["--quick"] if "--quick" in sys.argv else []
    lines = [
        "# Results",
        "",
        "Benchmarks of Penstock against Spark, PostgreSQL, DuckDB, Pathway and bare libraries. "
        "Each file in `bench/` describes its measures and its peer. Read ratios, not absolute "
        "times.",
        "",
        f"Written by `make bench` on {platform.machine()}, Python {platform.python_version()}"
        f"{', quick (smoke) run' if quick else ''}.",
        "",
        "| measure | ours | peer | ratio | target | |",
        "|---|---|---|---|---|---|",
    ]
    failed = 0
    for script in sorted(HERE.glob("*.py")):
        if script.name in NOT_BENCHMARKS:
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "measures.json"
            done = subprocess.run(
                [sys.executable, str(script), "--json", str(file), *quick], check=False
            )
            failed += done.returncode != 0
            if file.exists():
                measures = msgspec.json.decode(file.read_bytes(), type=list[Measure])
                lines += [measure.row() for measure in measures]
        if not quick:  # after each benchmark, so that an interrupted run keeps its results
            (HERE / "RESULTS.md").write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

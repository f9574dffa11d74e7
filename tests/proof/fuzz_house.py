"""What the command lines of the coverage-guided fuzzers share."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

MORE_S = 120
"""What libFuzzer may take beyond its time: starting, and a last slow input."""


def run_fuzzer(
    program: str,
    doc: str | None,
    child: Callable[[list[str]], None],
    seeds: Callable[[], Sequence[bytes]],
    read: Callable[[bytes], object],
) -> int:
    """Run the fuzzer `child` for its time, in a process of `program`. Return the exit status: 0
    if nothing was found."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.child:
        child(rest)
        return 0
    if options.replay is not None:
        read(options.replay.read_bytes())
        print("accepted, or refused by name")
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as scratch:
        corpus = options.corpus or Path(scratch)
        corpus.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds()):
            (corpus / f"seed-{number}").write_bytes(data)
        command = [sys.executable, program, "--child", str(corpus)]
        command += [f"-max_total_time={options.seconds}", f"-seed={options.seed}"]
        command += ["-max_len=65536", "-timeout=10", "-rss_limit_mb=2048", "-verbosity=1"]
        command += [f"-artifact_prefix={Path.cwd()}/fuzz-", "-print_final_stats=1"]
        done = subprocess.run(command, timeout=options.seconds + MORE_S, check=False)
    print(f"{options.seconds} s: {'nothing found' if done.returncode == 0 else 'FOUND A BUG'}")
    return 0 if done.returncode == 0 else 1

"""Coverage-guided fuzzing of all that reads a log's disk: records, control files, segments.

    .venv/bin/python tests/proof/fuzz_wal_storage.py [--seconds 600] [--seed 1] [--corpus FOLDER]

Needs atheris (requirements/fuzz.txt; `make proof` installs it). Anything but acceptance or one
named error ends the run with status 1; the input that did it is written where it was started.
``--replay FILE`` reads one input again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

MORE_S = 120
"""What libFuzzer may take beyond its time: starting, and a last slow input."""


def child(arguments: list[str]) -> None:
    """The fuzzer itself; libFuzzer ends the process."""
    import atheris

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.simulators`

    with atheris.instrument_imports(include=["actors.wal"]):
        from tests.simulators.wal.fuzzing import read

    atheris.Setup([sys.argv[0], *arguments], read)
    atheris.Fuzz()


def main() -> int:
    """Runs the fuzzer for its time. The exit status: 0 nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.child:
        child(rest)
        return 0
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.simulators`
    from tests.simulators.wal.fuzzing import read, seeds

    if options.replay is not None:
        read(options.replay.read_bytes())
        print("accepted, or refused by name")
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as scratch:
        corpus = options.corpus or Path(scratch)
        corpus.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds()):
            (corpus / f"seed-{number}").write_bytes(data)
        command = [sys.executable, __file__, "--child", str(corpus)]
        command += [f"-max_total_time={options.seconds}", f"-seed={options.seed}"]
        command += ["-max_len=65536", "-timeout=10", "-rss_limit_mb=2048", "-verbosity=1"]
        command += [f"-artifact_prefix={Path.cwd()}/fuzz-", "-print_final_stats=1"]
        done = subprocess.run(command, timeout=options.seconds + MORE_S, check=False)
    print(f"{options.seconds} s: {'nothing found' if done.returncode == 0 else 'FOUND A BUG'}")
    return 0 if done.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

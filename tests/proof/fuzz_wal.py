"""Coverage-guided fuzzing of the parsers of the WAL, each for its own time.

    .venv/bin/python tests/proof/fuzz_wal.py [--seconds 600] [--seed 1] [--target NAME]

Needs atheris (requirements/fuzz.txt; `make proof` installs it). Begins with the golden messages.
Inputs are changed by libFuzzer and by `tests.kit.wal_fuzz.mutated_wal` in turn. Anything but
acceptance or one named error ends the run with status 1; the input that did it is written into the
folder in which this runs. ``--replay FILE --target NAME`` reads one input again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`

ROOT = Path(__file__).resolve().parent.parent
MORE_S = 120
"""What libFuzzer may take beyond its time: starting, and a last slow input."""


def seeds() -> list[bytes]:
    """The golden messages, of all versions and sides: others' are a good way to be wrong."""
    from tests.kit.wal_fuzz import OPENINGS

    found: dict[str, bytes] = {}
    name = ""
    for line in (ROOT / "wal" / "golden_wal_messages.txt").read_text().splitlines():
        if line.startswith("["):
            name = line
        elif line and not line.startswith("#"):
            found[name] = found.get(name, b"") + bytes.fromhex(line.partition("  ")[0])
    return [*found.values(), *(data for given in OPENINGS.values() for data in given)]


def child(name: str, arguments: list[str]) -> None:
    """The fuzzer itself; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["actors.wal"]):
        from tests.kit.wal_fuzz import TARGETS, mutated_wal

    target, others = TARGETS[name], seeds()

    def read(data: bytes) -> None:
        target(data)

    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.4:
            changed: bytes = atheris.Mutate(data, size_max)
            return changed
        return mutated_wal(data, others, rng)[:size_max]

    atheris.Setup([sys.argv[0], *arguments], read, custom_mutator=mutate)
    atheris.Fuzz()


def fuzz(name: str, seconds: int, seed: int) -> bool:
    """Whether nothing was found in one parser."""
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-wal-") as scratch:
        for number, data in enumerate(seeds()):
            (Path(scratch) / f"seed-{number}").write_bytes(data)
        command = [sys.executable, __file__, "--child", "--target", name, scratch]
        command += [f"-max_total_time={seconds}", f"-seed={seed}"]
        command += ["-max_len=65536", "-timeout=10", "-rss_limit_mb=2048", "-verbosity=1"]
        command += [f"-artifact_prefix={Path.cwd()}/fuzz-wal-", "-print_final_stats=1"]
        done = subprocess.run(command, timeout=seconds + MORE_S, check=False)
    print(f"{name}, {seconds} s: {'nothing found' if not done.returncode else 'FOUND A BUG'}")
    return not done.returncode


def main() -> int:
    """Runs each parser's fuzzer for its time. The exit status: 0 nothing was found."""
    from tests.kit.wal_fuzz import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--replay", type=Path)
    options = parser.parse_args()
    if options.replay is not None:
        if options.target is None:
            parser.error("--replay needs the --target whose input it is")
        print(TARGETS[options.target](options.replay.read_bytes()) or "accepted")
        return 0
    names = [options.target] if options.target else list(TARGETS)
    failed = [name for name in names if not fuzz(name, options.seconds, options.seed)]
    return 1 if failed else 0


if __name__ == "__main__":
    # the child imports the parsers itself, under atheris
    if sys.argv[1:3] == ["--child", "--target"]:
        child(sys.argv[3], sys.argv[4:])
    sys.exit(main())

"""Coverage-guided fuzzing of all that reads a peer's bytes: frames, messages, rules, handshakes.

    .venv/bin/python tests/proof/fuzz_protocol.py [--seconds 600] [--seed 1] [--corpus FOLDER]

Needs atheris (requirements/fuzz.txt; `make proof` installs it). Begins with the golden frames and
whole handshakes; each input names its target in the first byte and the size of the pieces in the
second. Inputs are changed by libFuzzer and by `actors.testing.wire_fuzz.mutated` in turn.
Anything but acceptance or one named error ends the run with status 1; the input that did it is
written beside the corpus and its bytes are shown. ``--replay FILE`` reads one input again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
MORE_S = 120
"""What libFuzzer may take beyond its time: starting, and a last slow input."""


def golden() -> dict[str, list[bytes]]:
    """Bodies of every message, by direction."""
    found: dict[str, list[bytes]] = {}
    for line in (ROOT / "protocol" / "golden_frames.txt").read_text().splitlines():
        label, _, text = line.rpartition(": ")
        found.setdefault(label.rpartition(": ")[0], []).append(bytes.fromhex(text))
    found["commands by the rules"] = found["controller to cluster"]
    return found


def seeds() -> list[bytes]:
    """Inputs to begin with: every golden frame alone, all of a direction, every handshake."""
    from actors.testing.wire_fuzz import HANDSHAKES, TARGETS, framed

    bodies = golden()
    made: list[bytes] = []
    for number, name in enumerate(TARGETS):
        start = bytes([number, 0])
        if name in bodies:
            made += [start + framed([body]) for body in bodies[name]]
            made.append(bytes([number, 7]) + framed(bodies[name]))
        else:
            made += [start + data for data in HANDSHAKES]
    return made


def read(data: bytes) -> None:
    """One input: raises for anything but acceptance or a named error."""
    from actors.testing.wire_fuzz import TARGETS

    if len(data) < 2:
        return
    targets = list(TARGETS.values())
    targets[data[0] % len(targets)].read(data[2:], data[1] or 1 << 20)


def child(arguments: list[str]) -> None:
    """The fuzzer itself; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["actors.protocol", "actors.cluster"]):
        from actors.testing.wire_fuzz import mutated

    bodies = [body for found in golden().values() for body in found]

    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.4 or len(data) < 3:
            changed: bytes = atheris.Mutate(data, size_max)
            return changed
        return data[:2] + mutated(data[2:], bodies, rng)[: size_max - 2]

    atheris.Setup([sys.argv[0], *arguments], read, custom_mutator=mutate)
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

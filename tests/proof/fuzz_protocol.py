"""Coverage-guided fuzzing of all that reads a peer's bytes: frames, messages, rules, handshakes.

    .venv/bin/python tests/proof/fuzz_protocol.py [--seconds 600] [--seed 1] [--corpus FOLDER]

Needs atheris (requirements/fuzz.txt; `make proof` installs it). Begins with the golden frames and
whole handshakes; each input names its target in the first byte and the size of the pieces in the
second. Inputs are changed by libFuzzer and by `tests.kit.wire_fuzz.mutated` in turn.
Anything but acceptance or one named error ends the run with status 1; the input that did it is
written beside the corpus and its bytes are shown. ``--replay FILE`` reads one input again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from fuzz_house import run_fuzzer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`

ROOT = Path(__file__).resolve().parent.parent


def golden() -> dict[str, list[bytes]]:
    """Bodies of every message, by direction."""
    found: dict[str, list[bytes]] = {}
    for line in (ROOT / "model" / "protocol" / "golden_frames.txt").read_text().splitlines():
        label, _, text = line.rpartition(": ")
        found.setdefault(label.rpartition(": ")[0], []).append(bytes.fromhex(text))
    found["commands by the rules"] = found["controller to cluster"]
    return found


def seeds() -> list[bytes]:
    """Inputs to begin with: every golden frame alone, all of a direction, every handshake."""
    from tests.kit.wire_fuzz import HANDSHAKES, TARGETS, framed

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
    from tests.kit.wire_fuzz import TARGETS

    if len(data) < 2:
        return
    targets = list(TARGETS.values())
    targets[data[0] % len(targets)].read(data[2:], data[1] or 1 << 20)


def child(arguments: list[str]) -> None:
    """The fuzzer itself; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["actors.model.protocol", "actors.replica.cluster"]):
        from tests.kit.wire_fuzz import mutated

    bodies = [body for found in golden().values() for body in found]

    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.4 or len(data) < 3:
            changed: bytes = atheris.Mutate(data, size_max)
            return changed
        return data[:2] + mutated(data[2:], bodies, rng)[: size_max - 2]

    atheris.Setup([sys.argv[0], *arguments], read, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(run_fuzzer(__file__, __doc__, child, seeds, read))

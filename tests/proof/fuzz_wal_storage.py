"""Coverage-guided fuzzing of all that reads a log's disk: records, control files, segments.

    .venv/bin/python tests/proof/fuzz_wal_storage.py [--seconds 600] [--seed 1] [--corpus FOLDER]

Needs atheris (requirements/fuzz.txt; `make proof` installs it). Anything but acceptance or one
named error ends the run with status 1; the input that did it is written where it was started.
``--replay FILE`` reads one input again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fuzz_house import run_fuzzer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.simulators`


def child(arguments: list[str]) -> None:
    """The fuzzer itself; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["actors.wal"]):
        from tests.simulators.wal.fuzzing import read

    atheris.Setup([sys.argv[0], *arguments], read)
    atheris.Fuzz()


def seeds() -> list[bytes]:
    """Inputs to begin with."""
    from tests.simulators.wal.fuzzing import seeds

    return seeds()


def read(data: bytes) -> None:
    """One input: raises for anything but acceptance or a named error."""
    from tests.simulators.wal.fuzzing import read

    read(data)


if __name__ == "__main__":
    sys.exit(run_fuzzer(__file__, __doc__, child, seeds, read))

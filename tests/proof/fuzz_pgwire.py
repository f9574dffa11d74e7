"""Fuzzing of the door for PostgreSQL's clients: the decoder, and a whole service over sockets.

    .venv/bin/python tests/proof/fuzz_pgwire.py [--minutes 10] [--seed 1]

Sessions of clients are changed by `tests.kit.pg_fuzz`: malformed frames, half messages, false
lengths, messages out of order, other words of SQL, and requests to cancel at any byte. The decoder
must accept them or refuse them by name, and keep no more than a message. A service that gets many
at once must harm those connections alone: another client is answered all the while, no fault is
logged, no connection and no view of a subscribe is left, and memory stays where it was.
Exit status 1, with the seed of the round, when anything else happens.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
import anyio

from actors.doors.client.client import Client
from actors.model.protocol.relations import is_subscribed_view
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine
from tests.kit.pg_fuzz import (
    MESSAGE_BYTES_MAX,
    FuzzedDoor,
    attack_together,
    fuzzed_session,
    read_session,
)

DECODED = 200
"""Sessions for the decoder in each round."""
AT_ONCE = 12
"""Sessions for the service in each round."""
WARM_ROUNDS = 40
"""Rounds before memory is first measured: caches fill."""
GROWTH_BYTES_MAX = 96 << 20


def resident_bytes() -> int:
    """Memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def campaign(arguments: argparse.Namespace, folder: Path) -> int:
    """The exit status."""
    settings = Settings(
        state_dir=str(folder / "state"),
        listen="127.0.0.1:0",
        pg_listen="127.0.0.1:0",
        frame_bytes_max=MESSAGE_BYTES_MAX,
        result_bytes_max=MESSAGE_BYTES_MAX // 2,
        connect_timeout_ms=1_000,  # expires: of openings that never end
    )
    ends = time.monotonic() + arguments.minutes * 60
    number, before, decoded = 0, 0, 0
    async with Service(settings, engine=in_memory_engine()) as service:
        door = await FuzzedDoor.open(service)
        while time.monotonic() < ends:
            seed = arguments.seed * 1_000_000 + number
            rng = Random(seed)
            try:
                for _ in range(DECODED):
                    read_session(fuzzed_session(rng))
                sessions = [fuzzed_session(rng) for _ in range(AT_ONCE)]
                await attack_together(door, sessions, rng)
            except Exception as error:
                print(f"FOUND in round {number} (--seed of its Random: {seed}): {error!r}")
                raise
            number, decoded = number + 1, decoded + DECODED
            if number == WARM_ROUNDS:
                before = resident_bytes()
            if number % 100 == 0:
                print(f"{number} rounds", flush=True)
        await door.wait_alone()
        await door.check()
        wrong = await left(service)
        await door.aclose()
    if before:
        growth = resident_bytes() - before
        print(f"memory grew by {growth >> 20} MiB since round {WARM_ROUNDS}")
        wrong += growth > GROWTH_BYTES_MAX
    print(f"{decoded} sessions decoded, {number * AT_ONCE} sent: {wrong} wrong")
    return 1 if wrong else 0


async def left(service: Service) -> int:
    """How many views of subscribes outlived their connections."""
    async with await Client.in_process(service) as client:
        with anyio.move_on_after(30):
            while True:
                names = [each.name for each in (await client.status()).objects]
                found = [name for name in names if is_subscribed_view(name)]
                if not found:
                    return 0
                await anyio.sleep(0.1)
    print(f"left: {', '.join(found)}")
    return len(found)


def main() -> int:
    """Run for the given time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        return anyio.run(campaign, arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(main())

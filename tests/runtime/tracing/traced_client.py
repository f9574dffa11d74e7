"""A client program of its own: makes a table, a view and a subscriber, then inserts and reads.

``python traced_client.py ADDRESS``, traced as OpenTelemetry's variables say. Prints the times.
"""

from __future__ import annotations

import sys

import anyio

from actors import Client
from actors.runtime.tracing import setup

WAIT_MS = 200_000


async def run(address: str) -> None:
    """One insert, which a subscriber of the view sees, two reads, and one more view."""
    tracing = setup.current_tracing()
    assert tracing is not None, "the variables say where traces go"
    async with await Client.connect(address) as client:
        tracing.ratio = 0.0  # what prepares the stage is not to be traced
        await client.create_table("flights", {"id": "bigint", "carrier": "string"}, ["id"])
        await client.create_materialized_view(
            "by_carrier", "SELECT carrier, count(*) n FROM flights GROUP BY 1"
        )
        await client.create_index("by_carrier_carrier", "by_carrier", ["carrier"])
        time = await client.insert("flights", [{"id": 1, "carrier": "UA"}])
        for name in ("by_carrier", "by_carrier_carrier"):
            await client.wait_for(name, time, deadline_ms=WAIT_MS)
        changes = client.subscribe("by_carrier")
        while (await anext(changes)).table is None:
            continue
        tracing.ratio = 1.0
        time = await client.insert("flights", [{"id": 2, "carrier": "AA"}])
        tracing.ratio = 0.0
        while (change := await anext(changes)).table is None or change.upper <= time:
            continue
        assert change.table.column("carrier").to_pylist() == ["AA"]
        await changes.aclose()
        await client.wait_for("by_carrier_carrier", time, deadline_ms=WAIT_MS)
        tracing.ratio = 1.0
        rows = await client.peek("by_carrier", time, {"carrier": "AA"})
        assert rows.to_pylist() == [{"carrier": "AA", "n": 1}]
        whole = await client.peek("flights", time)
        assert whole.num_rows == 2
        await client.create_materialized_view(
            "ids", "SELECT id % 2 AS odd, sum(id) s FROM flights GROUP BY 1"
        )
        tracing.ratio = 0.0
        await client.wait_for("ids", time, deadline_ms=WAIT_MS)
    print(time)


if __name__ == "__main__":
    with setup.start(setup.read_options(service="demo-client")):
        anyio.run(run, sys.argv[1])

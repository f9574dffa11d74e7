"""The three views of the demo, as a user would write them."""

from __future__ import annotations

from typing import Final

import msgspec


class DemoView(msgspec.Struct, frozen=True):
    """A view: its name, its title, its SQL, and the order of its rows for people."""

    name: str
    title: str
    sql: str
    order: str
    """Column by which the picture sorts, largest first."""


DELAY_BY_CARRIER: Final = DemoView(
    name="delay_by_carrier",
    title="Delay by carrier",
    order="flights",
    sql="""
SELECT c.name AS carrier,
       count(*) AS flights,
       avg(f.dep_delay) AS mean_delay,
       sum(CASE WHEN f.status = 'cancelled' THEN 1 ELSE 0 END) / count(*) AS share_cancelled
FROM flights AS f
JOIN carriers AS c ON f.carrier = c.carrier
GROUP BY c.name
""".strip(),
)

DELAY_BY_WEATHER: Final = DemoView(
    name="delay_by_weather",
    title="Delay by weather",
    order="mean_delay",
    sql="""
SELECT CASE WHEN w.visib >= 10 THEN 'clear'
            WHEN w.visib >= 5 THEN 'haze'
            WHEN w.visib >= 1 THEN 'mist'
            ELSE 'fog' END AS visibility,
       count(*) AS flights,
       avg(f.dep_delay) AS mean_delay,
       sum(CASE WHEN f.status = 'cancelled' THEN 1 ELSE 0 END) / count(*) AS share_cancelled
FROM flights AS f
JOIN weather AS w ON f.origin = w.origin AND f.time_hour = w.time_hour
GROUP BY CASE WHEN w.visib >= 10 THEN 'clear'
              WHEN w.visib >= 5 THEN 'haze'
              WHEN w.visib >= 1 THEN 'mist'
              ELSE 'fog' END
""".strip(),
)

LATE_NOW: Final = DemoView(
    name="late_now",
    title="Late and in the air",
    order="dep_delay",
    sql="""
SELECT f.id, f.carrier, f.flight, f.origin,
       a.name AS destination, a.lat, a.lon, f.dep_delay
FROM flights AS f
JOIN airports AS a ON f.dest = a.faa
WHERE f.status = 'departed' AND f.dep_delay > 30
""".strip(),
)

VIEWS: Final = (DELAY_BY_CARRIER, DELAY_BY_WEATHER, LATE_NOW)

"""A user's program: its own Spark session, which knows nothing of the service. Prints JSON.

It runs the very examples of docs/guides/spark-source.md: that of rows, then what is not shown
there; or that of a stream.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "spark-source.md"
state_dir, work, phase = sys.argv[1:]
output, checkpoint = f"{work}/out", f"{work}/checkpoint"
SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config(
    "spark.sql.session.timeZone", "UTC"
).config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1").config(
    "spark.sql.shuffle.partitions", "2"
).getOrCreate()
first, second = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
scope: dict[str, Any] = {"state_dir": state_dir, "output": output, "checkpoint": checkpoint}
exec(first, scope)
spark: SparkSession = scope["spark"]
found: dict[str, Any] = {}


def load(name: str, **options: object) -> Any:
    reader = spark.read.format("penstock").option("stateDir", state_dir).option("object", name)
    for key, value in options.items():
        reader = reader.option(key, str(value))
    return reader.load()


def rows(frame: Any) -> list[list[Any]]:
    return sorted([list(row) for row in frame.collect()], key=repr)


def refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - whatever Spark makes of it
        return str(error)
    return ""


if phase == "stream":
    scope["run"] = lambda: exec(second, scope)
    # Spark gives the Python of a stream ten seconds to start, however busy the machine is.
    while "failed to connect back" in (told := refused(scope["run"])):
        print(told, file=sys.stderr)
    if told:
        raise SystemExit(told)
    changes = spark.read.parquet(output)
    found["streamed"] = rows(changes.groupBy("id").sum("_diff"))
    found["batches"] = sorted(path.name for path in (Path(checkpoint) / "offsets").glob("[0-9]*"))
else:
    frame = scope["by_carrier"]
    found["schema"] = frame.schema.simpleString()
    found["rows"] = rows(frame)
    found["again"] = rows(frame)
    found["joined"] = rows(frame.join(load("flights"), "carrier").groupBy("carrier").count())
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    found["filtered"] = rows(load("flights").where("id >= 47 and carrier is not null"))
    found["beyond"] = refused(lambda: load("flights", asOf=1 << 60))
    found["nothing"] = refused(lambda: load("flihgts"))
    found["many"] = load("flights", sumRowsMax=10, partitionBytes=1).rdd.getNumPartitions()
    found["divided"] = rows(load("flights", sumRowsMax=10, partitionBytes=1).select("id"))
print(json.dumps(found))
spark.stop()

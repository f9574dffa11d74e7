"""Shards as a data source of any Spark session: ``spark.dataSource.register(PenstockDataSource)``.

It runs in the driver and the executors of a user's own Spark, as an external process at the stores,
and never in the engine's child. docs/guides/spark-source.md tells how it is used.
"""

from actors.engine.spark.source.data_source import PenstockDataSource as PenstockDataSource

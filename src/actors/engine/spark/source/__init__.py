"""Shards as a data source of any Spark session: ``spark.dataSource.register(PenstockDataSource)``.

It runs in the driver and executors of a user's own Spark, as an external process that accesses the
stores, and never in the engine's child. See docs/guides/spark-source.md for its use.
"""

from actors.engine.spark.source.data_source import PenstockDataSource as PenstockDataSource

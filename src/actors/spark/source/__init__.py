"""Shards as a data source of any Spark session: ``spark.dataSource.register(PenstockDataSource)``.

Nothing here belongs to the engine's child: it runs in the driver and the executors of a user's own
Spark, as a guest of the stores. docs/spark-source.md tells how it is used.
"""

from actors.spark.source.data_source import PenstockDataSource as PenstockDataSource

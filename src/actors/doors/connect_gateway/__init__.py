"""The Spark Connect gateway: a user's own PySpark session over tables and views of this service.

It takes every call of the Spark Connect protocol and passes it to the Connect server of the Spark
that the service runs. In plans, names of the service's objects become their rows at one time;
statements of the service are executed by it; plain reads are answered without Spark.
"""

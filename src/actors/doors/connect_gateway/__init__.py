"""The Spark Connect gateway: a user's own PySpark session over tables and views of this service.

It accepts every call of the Spark Connect protocol and forwards it to the Connect server of the
service's own Spark. In plans, names of the service's objects are replaced by their rows at a single
timestamp. The service itself executes its own statements, and answers plain reads without Spark.
"""

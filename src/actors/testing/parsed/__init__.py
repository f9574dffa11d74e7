"""The in-memory engine's front end: makes a query's relational plan from a parser's tree, without
Spark.

It knows fewer constructs than Spark's own plan shows, and is used only in tests.
"""

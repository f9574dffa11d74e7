"""The in-memory engine's front end: a query's relational plan from a parser's tree, without Spark.

It knows fewer constructs than Spark's own plan shows, and stands in for it in tests alone.
"""

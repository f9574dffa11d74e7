"""Spark's analysed plan of a query → the relational plan that the delta rules know."""

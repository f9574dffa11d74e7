"""Translates Spark's analysed plan of a query to the relational plan that the delta rules take."""

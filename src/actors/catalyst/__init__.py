"""The front end: Spark's analysed plans, read as JSON, as relational plans."""

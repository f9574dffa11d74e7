"""From the text of a query to rows: grammar, analysis, delta rules, Spark."""

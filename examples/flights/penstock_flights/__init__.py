"""The demo: a month of real flights is streamed into three live views, with a proof at the end.

- `flights` generates the stream of changes (pure), and `statements` formats it as SQL (pure).
- `feeds` writes the stream: over `door`, a small PostgreSQL client, and `script`, which prints
  statements and results; or through a PostgreSQL database.
- `play` paces the stream and logs the writes, and `picture` draws the progress.
- `proof` compares the views with plain Spark.
- `run` combines all of these.
"""

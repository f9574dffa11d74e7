"""The demo: a month of real flights streamed into three live views, and a proof at the end.

`flights` makes the stream (pure), `views` holds the SQL, `play` drives a client and keeps its own
log, `picture` draws the progress, `proof` compares with plain Spark, `run` combines them.
"""

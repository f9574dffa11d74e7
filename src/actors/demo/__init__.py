"""The demo: a month of real flights played through three live views, and a proof at the end.

`flights` makes the stream (pure), `views` holds the SQL, `play` drives a client and keeps its
own log, `picture` shows what happens, `proof` compares with plain Spark, `run` puts them together.
"""

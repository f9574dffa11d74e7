"""The demo: a month of real flights streamed into three live views, and a proof at the end.

`flights` makes the stream (pure), `statements` writes it as SQL (pure), `door` and `script` send
the statements and print them, `play` keeps a log of what was written, `picture` draws the progress,
`proof` compares with plain Spark, `run` combines them.
"""

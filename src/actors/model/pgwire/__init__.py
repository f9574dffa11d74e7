"""PostgreSQL's frontend/backend protocol, the server's side, as bytes: no socket, no clock.

`decoder` turns a client's bytes into `messages`, which also has the encoders of what a server
sends. `row_encoding` turns Arrow batches into rows, `row_decoding` the rows of a COPY into Arrow
batches, `parameters` bound values into Spark's literals. `scram` proves passwords.
"""

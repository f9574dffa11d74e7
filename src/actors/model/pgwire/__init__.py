"""PostgreSQL: the server's side of its protocol, its types, and their values as text and in binary.
No socket, no clock.

`decoder` turns a client's bytes into `messages`, which also has the encoders of what a server
sends. `row_encoding` turns Arrow batches into rows, `row_decoding` the rows of a COPY into Arrow
batches, `parameters` bound values into Spark's literals. `scram` proves passwords. Sources read
PostgreSQL's own values by `column_parsing`, and write SQL by `quoting`. `type_oids` has the
types, `type_map` those of Spark that hold them.
"""

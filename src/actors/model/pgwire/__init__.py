"""The server side of PostgreSQL's protocol, its types, and their text and binary values.

This package uses no sockets and no clock. `decoder` turns a client's bytes into `messages`;
`messages` also encodes what a server sends. `row_encoding` turns Arrow batches into rows,
`row_decoding` turns the rows of a COPY into Arrow batches, and `parameters` turns bound values into
Spark literals. `scram` verifies passwords. Sources use `column_parsing` to read PostgreSQL's own
values and `quoting` to write SQL. `type_oids` defines PostgreSQL's types, and `type_map` maps them
to Spark's.
"""

"""The WAL: a durable log that speaks the protocol of Neon's safekeepers.

A *proposer* streams a log of bytes to several *acceptors*. Bytes that a majority of them has on
disk are *committed*. `lsn` computes positions; `messages` and its codecs define the wire format;
`acceptor` contains the rules of one acceptor (pure), and `acceptor_stores` the interface of its
disk.
"""

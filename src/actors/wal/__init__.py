"""The WAL: a durable log that speaks the protocol of Neon's safekeepers.

A *proposer* streams a log of bytes to several *acceptors*; bytes that a majority of them has on
disk are *committed*. `lsn` computes positions, `messages` and its codecs are the wire format,
`acceptor` holds the rules of one acceptor (pure), and `stores` the interface of its disk.
"""

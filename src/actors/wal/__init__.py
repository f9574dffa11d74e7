"""The WAL: a durable front door that speaks the protocol of Neon's safekeepers.

A *proposer* streams a log of bytes to several *acceptors*; what a majority of them has on disk is
*committed*. `lsn` is the arithmetic of positions, `messages` and its codecs are the wire,
`acceptor` is the rules of one acceptor (pure), `stores` says what it needs of a disk.
"""

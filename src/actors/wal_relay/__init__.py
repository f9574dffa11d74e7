"""`penstock wal relay`: a PostgreSQL server's log, as its standbys get it, into acceptors.

`command` is the command line, `relay` the relay at work, `server` the server's side.
"""

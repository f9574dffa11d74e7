"""`penstock wal relay`: streams a PostgreSQL server's log, as a standby gets it, to acceptors.

`command` is the command line, `relay` the relay at work, `server` the server's side.
"""

"""The simulation of a replica's workers, both halves on one runtime: clients that displace each
other on either connection, tasks that fail, floods, restarts.

`run.simulate` runs a `schedule.Schedule`; `wishes` computes the clients' desired state a second
time, and `checkers` judges the run; `planted` holds bugs that must be found. It needs no event
loop: the rules of workers, connections, adapters and the one order are pure, so a run is a sequence
of deliveries chosen by dice, and takes some twenty milliseconds.
"""

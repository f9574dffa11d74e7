"""The simulation of the WAL: acceptors and proposers on a bad network, with disks that forget.

`run.simulate` runs a `schedule.Schedule`; `checkers` judges what happened; `planted` holds bugs
that must be found. There is no loop in it: the acceptor and the proposer are pure, so a queue of
events in virtual milliseconds (`network`) is all of it, and a run takes a few milliseconds.
"""

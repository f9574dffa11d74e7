"""The simulation of the WAL: acceptors and proposers on a bad network, with disks that lose data.

`run.simulate` runs a `schedule.Schedule`; `checkers` judges the run; `planted` holds bugs that must
be found. It needs no event loop: the acceptor and the proposer are pure, so a queue of events in
virtual milliseconds (`network`) drives them, and a run takes a few milliseconds.
"""

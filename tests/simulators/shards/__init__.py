"""The simulation of persist alone: a few processes at work on the same shards, under faults.

`run.simulate` runs a `schedule.Schedule`; `truth` and `calls` judge the run; `planted` holds bugs
that must be found. It shares the loop, the stores and the faults with the simulated cluster.
"""

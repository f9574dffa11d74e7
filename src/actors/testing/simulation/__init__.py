"""The parts of a simulated cluster: faults, stores, links, an engine, a workload, checkers.

`actors.testing.cluster` puts them together; `actors.testing.simulate` runs campaigns.
"""

"""What a simulated cluster is made of: faults, stores, links, an engine, a workload, checkers.

`actors.testing.cluster` puts them together; `actors.testing.simulate` runs campaigns.
"""

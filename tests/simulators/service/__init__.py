"""The parts of a simulated cluster: faults, stores, links, an engine, a workload, checkers.

`tests.simulators.service.cluster` puts them together; `tests.simulators.campaign` runs campaigns.
"""

"""Simulators: the service, or a part of it, in virtual time, with faults drawn from seeds.

Run: ``python -m tests.simulators --runs 100 [--persist | --halves | --wal | --wal-files]``.
"""

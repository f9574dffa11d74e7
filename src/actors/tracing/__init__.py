"""Setup of traces, measures and log lines, imported only by a process that wants them.

`start` and `Tracing` are in `actors.tracing.setup`; names and contexts in `actors.telemetry`.
"""

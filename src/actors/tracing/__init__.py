"""Setting up traces, measures and log lines: what only a process that wants them imports.

`start` and `Tracing` are in `actors.tracing.setup`; names and contexts in `actors.telemetry`.
"""

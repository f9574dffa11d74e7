"""Setup of traces, measures and log lines, imported only by a process that wants them.

`start` and `TracingSetup` are in `actors.runtime.tracing.setup`; names and contexts in
`actors.runtime.telemetry`.
"""

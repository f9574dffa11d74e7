"""Export of traces, metrics and log lines. A process imports only the modules that it uses.

`start` and `TracingSetup` are in `actors.runtime.tracing.setup`; names and contexts of spans are in
`actors.runtime.telemetry`.
"""

"""Sinks: connectors that write changes to an external system, one kind per file; see `sink`."""

"""Sources: connectors that ingest an external system's changes, one kind per file; see `source`."""

"""Sources: connectors that ingest an external system's changes; `source` defines their
interface."""

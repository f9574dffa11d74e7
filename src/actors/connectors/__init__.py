"""Connectors: sources ingest changes and sinks write them; tasks drive both."""

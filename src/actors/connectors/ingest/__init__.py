"""The core of the ingest task: staging, upserts, and appends to the source's shards."""

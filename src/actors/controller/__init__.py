"""The client half: oracle, catalog, group commit, holds, reads and subscribes. One a service."""

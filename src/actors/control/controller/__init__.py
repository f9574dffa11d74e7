"""The service's controller: oracle, catalog, group commit, holds, reads and subscribes."""

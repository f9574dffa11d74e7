"""Answers the queries of PostgreSQL clients on `pg_catalog` and `information_schema`. Pure."""

"""Answers to what PostgreSQL clients ask of `pg_catalog` and `information_schema`. Pure."""

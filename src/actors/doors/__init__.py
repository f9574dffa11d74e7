"""The ways in: the Python client, SQL sessions, PostgreSQL, Spark Connect, the command line."""

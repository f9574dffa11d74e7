"""The server for PostgreSQL clients: a listener, and one SQL session for each connection."""

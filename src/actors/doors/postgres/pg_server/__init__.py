"""The door for PostgreSQL's clients: a listener, and one SQL session for each connection."""

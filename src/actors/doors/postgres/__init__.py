"""The server for PostgreSQL clients, and the system catalog that they see."""

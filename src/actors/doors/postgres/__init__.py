"""The door for PostgreSQL's clients, and the system catalog that they see."""

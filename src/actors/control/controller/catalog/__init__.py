"""The durable catalog and the statements that change it."""

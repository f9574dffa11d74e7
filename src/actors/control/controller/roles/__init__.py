"""The controller's roles: the durable record, and the right that each request needs."""

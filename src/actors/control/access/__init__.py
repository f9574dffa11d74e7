"""Roles: how a client proves one, and what each may do. Pure."""

"""Roles: what proves them, and what they may do. Pure."""

"""Reads, queries and subscribes, from the request to the last answer."""

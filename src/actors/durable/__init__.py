"""Shards, arrangements, and the stores that they are in."""

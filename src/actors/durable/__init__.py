"""Durable state: shards, arrangements, and the stores that contain them."""

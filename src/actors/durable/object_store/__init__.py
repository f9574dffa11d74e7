"""Buckets of object stores: their URLs, and the few calls to them."""

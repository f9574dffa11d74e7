"""Buckets of object stores: what their URLs mean, and the few calls that are made to them."""

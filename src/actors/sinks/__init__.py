"""Sinks: what carries changes out, a kind a file. `sink` says what one is."""

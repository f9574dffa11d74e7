"""The base of every program of actors: kernel, transport, tracing, settings, errors, progress."""

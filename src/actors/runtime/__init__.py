"""The base on which all actors run: kernel, transport, tracing, settings, errors, progress."""

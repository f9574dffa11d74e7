"""Connectors: sources bring changes in, sinks carry changes out; the tasks that drive both."""

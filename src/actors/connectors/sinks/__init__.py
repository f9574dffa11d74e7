"""Sinks: connectors that write changes to an external system; `sink` defines their interface."""

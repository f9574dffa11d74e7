"""Sources and sinks as the controller sees them, and the cleanup of external resources."""

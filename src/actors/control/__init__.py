"""The controller, and who may do what."""

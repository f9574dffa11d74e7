"""The controller and access control."""

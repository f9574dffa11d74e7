"""Messages on a wire or between packages, such as client requests and compute commands."""

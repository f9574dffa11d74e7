"""Messages on a wire or between packages: compute commands, client requests, frames."""

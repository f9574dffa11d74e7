"""Messages that cross a wire or a room: compute commands, client requests, frames."""

"""Sessions: one actor per client connection, over a socket or in memory."""

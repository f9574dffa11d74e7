"""Sessions: one actor a client connection, over a socket or in memory."""

"""Message connections over TCP, Unix sockets and TLS, with authentication of peers."""

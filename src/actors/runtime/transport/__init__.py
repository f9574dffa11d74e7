"""Message connections over TCP, Unix sockets and TLS, with proof of who speaks."""

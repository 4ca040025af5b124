"""The server side of a connection: listener, interceptors, limits per caller, sockets, shutdown."""

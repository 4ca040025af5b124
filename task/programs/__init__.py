"""Server programs as processes: the socket to the coordinator, the grid that they call, the entry point."""

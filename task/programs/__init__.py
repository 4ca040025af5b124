"""Programs of a server that run as processes: the line to the coordinator, the grid that they call, the entry point."""

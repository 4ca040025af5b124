"""A ServerApp's `main()` as a server program: Flower's grid over a run of messages."""

"""The settings of a run and of the server's processes."""

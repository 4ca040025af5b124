"""The start, restart and end of ranks (processes) on this machine, by torch elastic with a fork server."""

"""The start, restart and end of ranks on this machine, by torch elastic with a fork server that has torch loaded."""

"""The hosting of runs in the coordinator's process: run drivers, connected clients, the judge of updates, retention."""

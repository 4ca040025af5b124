"""The hosting of runs in the coordinator's process: run drivers, connected clients, the judging of updates, retention."""

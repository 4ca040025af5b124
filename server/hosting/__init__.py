"""The hosting of runs in the coordinator's process: run drivers, connected clients, the judging of updates, retention.

Imports: all folders of `server` below it, that is all but `services` and `backup`.
"""

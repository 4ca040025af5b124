"""The coordinator's process: runs and their drivers, connected clients, verdicts on updates, retention.

Imports everything below.
"""

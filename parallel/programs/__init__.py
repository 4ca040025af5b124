"""The process of a server program: its grid of nodes, over a socket to the coordinator that holds the connections.

Imports: `task` (contents, references, generators), `flower` (records), `aggregation` (the files of tensors).
"""

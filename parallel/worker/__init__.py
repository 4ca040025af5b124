"""The process that runs a user's training and evaluation, apart from the process that holds the connection.

Imports: `task`, `local_training`, and of `aggregation` the places that `parallel` may import.
"""

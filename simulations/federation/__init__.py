"""A federation in one process and in virtual time, with real training and folds.

Coordinator and clients are the deployed state machines.
"""

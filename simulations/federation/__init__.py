"""A federation in one process: the deployed state machines of coordinator and clients in virtual time, with real
training and folds.
"""

"""The worker process that holds a task and answers requests: train, evaluate, initialize.

Imports: `local_training`.
"""

"""The task that a user writes: model, data, loss, metrics, local settings; and how it is found.

Imports nothing of ours but the ground's layout.
"""

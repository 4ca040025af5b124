"""The jobs of an agent: from an invitation to a finished update, and the worker that trains it.

Imports: `session`, `disk`, `wire` and `protocol`; from the ground `aggregation/tensors` and `parallel/worker`.
"""

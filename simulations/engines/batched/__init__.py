"""The engine that trains many clients in one product, as one batch of models.

Imports: `engines`; `parallel` (the task, local training, a worker's bench as reference), `aggregation` (the layout of
tensors, numba).
"""

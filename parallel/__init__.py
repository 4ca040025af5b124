"""The training engine: a Task, its local training, its evaluation, and the worker process that runs them."""

"""The training side: the task, its local training, the worker process, and the distributed training engine."""

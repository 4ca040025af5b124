"""The training side: the task, its local training, the worker process, and the distributed training engine.

Imports: of the other rooms, `aggregation/tensors`, `aggregation/folders`, `aggregation/codecs/names` and
`aggregation/updates/encoded_writer` alone.
"""

"""The training side: the task, its local training, the worker process, and the distributed training engine.

Imports: of the other rooms, `tensors`, `ground/folders`, `tensors/codecs/names` and
`tensors/updates/encoded_writer` alone.
"""

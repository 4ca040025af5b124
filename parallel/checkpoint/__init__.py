"""Distributed checkpoints: saved under any mesh, loaded under any other or in one process.

Imports: `aggregation/tensors`, `aggregation/folders`, `aggregation/file_digest`.
"""

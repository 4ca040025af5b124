"""The fold of updates that lie in memory as rows of one matrix, as the simulator has them.

Imports: `fold`, `tensors`, `numba_support`.
"""

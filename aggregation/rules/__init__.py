"""The robust aggregation rules, which examine every update of a round.

Imports: `tensors`, `updates`, `numba_support`, `ordered_map`.
"""

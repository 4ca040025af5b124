"""The exact weighted sum of updates and the step to the next version, streaming or across ranks.

Imports: `rules`, `updates`, `tensors`, `optimizers`, `ordered_map`, `numba_support`.
"""

"""The robust aggregation rules, which look at every update of a round.

Imports: `tensors`, `updates`.
"""

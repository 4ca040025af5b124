"""Statistics of the sites' data, before a training: one collection, its exact sum, what may be shown, the kept result.

Imports: nothing of the server. Pure, but for `results`.
"""

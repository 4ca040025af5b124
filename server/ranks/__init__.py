"""The aggregation ranks: their processes, their uploads, fetches between them, and the sharded fold.

Imports: `folding`, `transfers`, `files`, `identity`, `journal`, `transport` and what lies below them.
"""

"""The aggregation ranks: their process, uploads, fetches between ranks, and the sharded fold.

Imports: `folding`, `transfers`.
"""

"""The aggregation ranks: their processes, their uploads, fetches between them, and the sharded fold."""

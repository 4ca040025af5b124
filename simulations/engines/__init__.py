"""Engines that train many clients fast: one after another, in several processes, in batched products, or over Ray."""

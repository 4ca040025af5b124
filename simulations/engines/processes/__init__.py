"""The engines that train clients in several processes, here or over Ray.

Imports: `batched`.
"""

"""Engines that train many clients fast: one after another, in several processes, in batched products, or over Ray.

Imports: `parallel` (the task, local training, the worker's benches), `aggregation` (the layout of tensors), `protocol`
(the value type); `choice` alone imports `batched` and `processes`.
"""

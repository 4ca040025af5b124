"""The state that an agent keeps on its disk: spool, model cache, residuals, client state, rollback protection.

Imports: `session` and `protocol`; from the ground `aggregation/tensors`, `aggregation/updates` and files beside them.
"""

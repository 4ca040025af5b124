"""The hash chain of the audit log: its lines, its files, the repair of a torn end.

Imports: `durable` and `file_lock` of `protocol`; from the ground `aggregation/folders.py`.
"""

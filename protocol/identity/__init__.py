"""The identities of a federation: names in certificates, enrolment and renewal, credentials, signed statements.

Imports: `wire`, `settings`, `file_lock` and `backoff` of `protocol`; from the ground `aggregation/folders.py`.
"""

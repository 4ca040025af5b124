"""The commands about identities and trust: members, join codes, the authority, a site's policy, the audit log.

Imports: the files of `cli` itself and `cli/runs`; of the rooms, `protocol`, `server` and `client`.
"""

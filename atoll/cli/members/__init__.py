"""The commands about identities and trust: members, join codes, the authority, a site's policy, the audit log.

Imports: the files of `cli` itself and `cli/looking`; of the rooms, `protocol`, `server` and `client`.
"""

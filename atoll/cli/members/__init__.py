"""The commands about identities and trust: members, join codes, the authority, a site's policy, the audit log."""

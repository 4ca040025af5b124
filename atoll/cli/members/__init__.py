"""The commands about identities: clients, the authority, a site's policy, the audit log."""

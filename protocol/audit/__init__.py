"""The hash chain of the audit log: its lines, its files, the repair of a torn end."""

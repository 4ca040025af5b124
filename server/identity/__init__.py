"""Who may call what: the authority, the members and their roles."""

"""Identity: the authority, the members and their roles, and the guard that checks every call."""

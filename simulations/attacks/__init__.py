"""Malicious clients: what they do to their data and to their updates, and how well a backdoor has taken."""

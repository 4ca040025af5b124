"""Malicious clients: poisoned training data, forged updates and the success of a backdoor."""

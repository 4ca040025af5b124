"""Malicious clients: poisoned training data, forged updates and the success of a backdoor.

Imports: `parallel` (the task, local training), `protocol` (the settings).
"""

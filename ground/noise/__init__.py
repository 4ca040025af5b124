"""Secret noise: the key of each purpose, derived from a secret, and the generator of a key."""

"""The fold of masked updates: the sums of their words, and the next version from the sums of a round's sessions."""

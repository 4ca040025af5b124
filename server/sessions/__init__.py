"""The coordinator's side of a secure sum: who has sent what, and what opens the sum. Pure."""

"""A ServerApp of ten rounds, for the deaths of its process and of its coordinator."""

"""Simulator: a federation with real training in virtual time."""

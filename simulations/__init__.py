"""Simulator: a federation with real training in virtual time.

Imports: `server`, `client`, `protocol`, `parallel`, `aggregation`.
"""

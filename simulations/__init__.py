"""The simulator: a federation with real training in virtual time, and histories of faults that check the machines.

Imports: `server`, `client`, `protocol`, `parallel`, `aggregation`.
"""

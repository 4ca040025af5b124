"""The audit log: who did what, in a signed hash chain.

Imports: `rounds` (its effects), `transport`, and `protocol.audit`, which has the files and the chain.
"""

"""The pure rules of an agent: its session as a state machine, its events and effects, the refusal of rollback.

Imports: pure modules of `protocol` (vocabulary, value type, back-off); no clock, socket, file or source of randomness.
"""

"""The pure rules of a run: membership, rounds, updates, straggler policy; no clock, socket, file or randomness.

Imports: `protocol` (the vocabulary, the value types), `aggregation` (the weights of a fold).
"""

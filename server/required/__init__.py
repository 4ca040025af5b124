"""The files that the journal requires: which these are, and the check that each is there and undamaged.

Imports: `files`, `journal`, `folding`, `rounds`, `exchanges`, `protocol`, `aggregation`.
"""

"""Experiments whose results are tables of the documentation.

Imports: `experiments`, `attacks`; `parallel` (the task), `aggregation` (the file of a version).
"""

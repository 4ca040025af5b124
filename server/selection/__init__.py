"""The pure selection of a cohort: samplers, Oort, weighted draws.

Imports: `rounds`, `protocol` (the vocabulary; for the user's own sampler also references and settings).
"""

"""Optimizers and rules for large batches: layer-wise steps, learning-rate schedules, noise scale.

Imports: no other folder.
"""

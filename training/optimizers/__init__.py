"""Optimizers for large batches: layer-wise steps, learning-rate schedules, noise scale."""

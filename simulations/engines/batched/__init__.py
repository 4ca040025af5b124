"""The engine that trains a group of many clients at once, as one batch of models with joint matrix products."""

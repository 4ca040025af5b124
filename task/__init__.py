"""The task that a user writes (model, data, loss, metrics, local settings) and the way to load it."""

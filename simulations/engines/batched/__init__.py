"""The engine that trains many clients in one product, as one batch of models."""

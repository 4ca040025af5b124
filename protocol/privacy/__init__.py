"""The guarantees of differential privacy: what mechanisms cost, and the sentence that states a guarantee. Pure."""

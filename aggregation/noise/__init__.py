"""Private noise: exact discrete Gaussian samples from keys, on a grid that follows from settings alone."""

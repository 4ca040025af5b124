"""Discrete noise of a tensor's elements: exact samples of the discrete Gaussian, from keys, by blocks of elements."""

"""Tests of `examples/teaching`."""

"""The generators of the reference pages."""

"""Experiments whose results are tables of the documentation, such as the tables of papers."""

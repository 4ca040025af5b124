"""Generators of the pages with commands, settings and signatures."""

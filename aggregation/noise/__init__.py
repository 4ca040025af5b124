"""Noise that protects: the key of each purpose, from a secret, and the generator of a key.

Imports: nothing of Atoll.
"""

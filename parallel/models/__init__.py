"""Models with a blueprint of how they can be divided over ranks: a decoder, an MLP and a CNN.

Imports: `engine`.
"""

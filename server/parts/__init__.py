"""The rules of an update in parts on its way in, and of partial uploads: pure.

It may import the protocol's vocabulary and nothing else.
"""

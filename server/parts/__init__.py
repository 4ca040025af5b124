"""The rules of an incoming update in parts, and of partial uploads: pure.

It may import the protocol's vocabulary and nothing else.
"""

"""The names of clients and ranks that two processes use at once: which of the two has the place, and how long it
lasts; and the file that shows to commands who is connected.

Imports: `protocol`.
"""

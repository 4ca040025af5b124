"""The Python interface: what the commands do, for scripts and notebooks.

Imports: every room, and the rest of the command line.
"""

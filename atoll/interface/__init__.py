"""The Python interface: what the commands do, for scripts and notebooks.

Imports: `operations` and every room; nothing of the command line.
"""

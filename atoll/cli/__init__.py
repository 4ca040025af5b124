"""The command line of Atoll, one module for each noun or verb of it.

A command parses its request, calls an operation and prints the result. It imports what it needs when it is called, so
that `atoll --help` answers at once.

Imports: `operations` and every room, within commands; on loading, only small modules and what a folder's commands share.
"""

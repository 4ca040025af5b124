"""The command line of Atoll, one module for each noun or verb of it.

Each command imports the rooms that it needs when it is called, so that `atoll --help` answers at once.

Imports: every room, within commands; on loading, only small modules of `protocol` and what a folder's commands share.
"""

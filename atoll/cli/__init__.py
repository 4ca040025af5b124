"""The command line of Atoll: a command parses its request, calls an operation and prints the result.

It imports what it needs when it is called, so that `atoll --help` answers at once.
"""

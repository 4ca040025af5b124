"""The names of clients and ranks that two processes use at once, and the file of connected processes.

The rules say which of the two holds the name, and for how long; commands read the file.
"""

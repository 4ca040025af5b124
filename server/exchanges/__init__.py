"""The pure rules of a run of messages: exchanges of a server program with its nodes, and their replay to a new process.

Imports: `rounds` (the events of clients), `protocol` (the vocabulary, the value types).
"""

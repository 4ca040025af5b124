"""A simulated run of messages: the server program in a process, and a federation in virtual time."""

"""The pure rules of a run of messages: exchanges of a server program with its nodes, and their replay."""

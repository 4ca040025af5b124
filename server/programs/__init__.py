"""The process of a server program beside the coordinator, and the contents of its messages on disk."""

"""The process that runs a user's training and evaluation, apart from the process that holds the connection."""

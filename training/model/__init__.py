"""The model of a task in one process: built, named by tensor, partly frozen, and restored as it was built."""

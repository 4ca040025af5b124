"""Trials of a task for a mesh: what a plan would compute otherwise than one process, found by running both."""

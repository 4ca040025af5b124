"""Trials of a task for a mesh: what a plan would compute differently from one process, found by running both."""

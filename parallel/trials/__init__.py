"""Trials of a task on a mesh: they find what a plan computes differently from one process, by running both."""

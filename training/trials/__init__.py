"""Trials of a task's model, loss and data in one process: faults that are found by running them."""

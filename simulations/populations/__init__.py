"""The partition of a task's pooled data among simulated clients, by seed, with a report and a plot.

Imports: `parallel` (the task, batches of a data set), `protocol` (the settings).
"""

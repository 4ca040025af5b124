"""The partition of a task's pooled data among simulated clients, by seed, with a report and a plot."""

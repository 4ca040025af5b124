"""Behind `atoll train`: from the command line to a job, the launch of its ranks, and what each of them does."""

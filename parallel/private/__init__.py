"""Example-level differential privacy of a centralized training: its terms, samples, passes and account of steps."""

"""Example-level differential privacy of a centralized training: its terms, samples, passes and the steps it has used."""

"""The commands that simulate federations: one run, a sweep, a comparison with centralized training, a population."""

"""The commands that show runs, rounds, models and ranks, or change a run."""

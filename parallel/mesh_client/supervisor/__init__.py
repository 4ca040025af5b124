"""The agent's side of a crew: its launcher, its folder and its terms. Without torch."""

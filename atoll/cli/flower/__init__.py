"""The commands on a Flower app: a check of how it runs, and its run on this machine."""

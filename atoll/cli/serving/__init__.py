"""The commands that start long-running processes, enrol them and back them up."""

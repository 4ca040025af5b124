"""The planner: memory, traffic, bubble and time of a mesh before anything runs on it, by formulas and dry runs."""

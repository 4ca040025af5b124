"""What a mesh would cost before anything runs on it: memory, traffic, bubble and time, from formulas and from dry runs."""

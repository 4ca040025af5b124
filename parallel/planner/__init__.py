"""What a mesh would cost before anything runs on it: memory, traffic, bubble and time, by formulas and dry runs."""

"""Odd tasks in every way to run one: each cell is equal to a plain loop, or refused before the first step."""

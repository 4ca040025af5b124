"""Drills on one machine: a line with troubles, and kills of a process, both drawn from a seed."""

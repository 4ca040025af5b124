"""The examples of each data-parallel rank in each step, and their loading; resumable to the exact example.

Imports: of `local_training` the collation of batches.
"""

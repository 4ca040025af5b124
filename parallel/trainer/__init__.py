"""The centralized training of a task: the pooled data of all its sites, on one device or on a mesh.

Imports: `checkpoint`, `data`, `engine`, `optimizers`, `task`, `world`, and of `local_training` the seeding.
"""

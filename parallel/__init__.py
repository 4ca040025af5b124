"""A mesh of ranks: the training engine, the centralized trainer, the mesh client and the planner."""

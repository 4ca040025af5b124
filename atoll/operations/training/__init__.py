"""A centralized training: the job that its request names, its folder, and the processes that train."""

"""The centralized training of a task: the pooled data of all its sites, on one device or on a mesh."""

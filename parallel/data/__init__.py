"""Which examples a data-parallel rank gets in which step, and how they come to it; resumable to the exact example."""

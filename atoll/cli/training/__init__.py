"""The commands for centralized training: `atoll train`, with the launch of its ranks, and `atoll plan`."""

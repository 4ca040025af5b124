"""The commands for centralized training: `atoll train` and `atoll plan`."""

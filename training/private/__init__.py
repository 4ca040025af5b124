"""Example-level differential privacy of one client's training: DP-SGD, without a mesh."""

"""A Flower app in the style of its own quickstart for PyTorch."""

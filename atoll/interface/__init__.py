"""The Python interface: the operations for scripts and notebooks."""

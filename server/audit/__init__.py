"""The audit log: who did what, in a signed hash chain."""

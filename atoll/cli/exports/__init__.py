"""The command `atoll export`, and the export of a run while it runs in this process."""

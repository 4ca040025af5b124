"""The backup of a coordinator's state directory, the check that it is complete, and its restoration."""

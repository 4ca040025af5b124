"""The commands that run a coordinator, an aggregation rank or an agent, and back up a coordinator's state."""

"""The agent: the process at a data owner's site that trains, evaluates and uploads for one client."""

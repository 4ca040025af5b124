"""The privacy of a run before and after it: the plan of its noise, its preview, and the audit of a task."""

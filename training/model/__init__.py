"""The model of a task in one process: built, its tensors by name, its frozen part, and the state that it begins with."""

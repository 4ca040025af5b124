"""The jobs of an agent: from an invitation to a finished update, and the worker that trains it."""

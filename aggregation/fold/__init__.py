"""The exact weighted sum of updates and the step to the next version, streaming or across ranks."""

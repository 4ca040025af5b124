"""Statistics of the sites' data, before a training: collection, exact sum, disclosure, the kept result."""

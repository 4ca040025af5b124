"""Statistics of the sites' data before a training: collection, exact sum, disclosure, stored result."""

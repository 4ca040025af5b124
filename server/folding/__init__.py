"""The plan of a fold and its execution: from a closed round to the next version and its evaluation."""

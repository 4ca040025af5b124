"""Custom code in place of a built-in: found by a package's name or a reference, loaded, and guarded in its calls."""

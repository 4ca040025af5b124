"""Model with a blueprint of how it can be divided over ranks: a decoder."""

"""Models that say of themselves how they can be cut: a decoder, an MLP and a CNN."""

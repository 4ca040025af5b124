"""A Flower app with a NumPyClient of scikit-learn."""

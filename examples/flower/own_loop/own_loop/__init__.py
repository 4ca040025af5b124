"""A Flower app with a server loop of its own, and clients of scikit-learn alone."""

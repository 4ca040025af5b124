"""Training many clients fast: one after another, in several processes, batched into one product, or over Ray."""

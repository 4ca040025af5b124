"""Less communication between ranks: compressed gradients, replicas that synchronize rarely or late."""

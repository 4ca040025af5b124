"""Native tasks as Flower apps."""

"""What the clients run on: how fast they compute, how far away they are, when they are awake."""

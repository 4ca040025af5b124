"""The clients' simulated devices: speed of computing, speed and latency of the network, availability."""

"""Engines that train clients in several processes, on this machine or over Ray."""

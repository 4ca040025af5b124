"""Distributed checkpoints: saved under any mesh, loaded under any other or in one process."""

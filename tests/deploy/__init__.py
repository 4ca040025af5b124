"""Tests of deploy/: an image, manifests, batch scripts."""

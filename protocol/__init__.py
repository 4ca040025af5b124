"""What both sides agree on: words, settings, manifests, messages, status codes."""

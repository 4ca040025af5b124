"""The protocol that coordinator, ranks and clients share: vocabulary, settings, manifests, identities, messages."""

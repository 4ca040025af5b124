"""The protocol that coordinator, ranks and clients share: vocabulary, settings, manifests, identities, messages.

Imports: from the ground `aggregation` (tensors, codecs, weights) and `parallel/task`.
"""

"""Large models of which a small part is trained: the base's files, digests of frozen tensors, adapters."""

"""The tensors of a model in files: layout, pieces, ownership by rank, the safetensors format; codecs and updates."""

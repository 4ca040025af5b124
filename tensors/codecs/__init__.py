"""The codecs of updates: names, kernels, quantization, sparsification, error feedback."""

"""The codecs of updates: names, kernels, quantization, sparsification, error feedback.

Imports: `tensors`, `numba_support`.
"""

"""Tiles of the score matrix: each is computed, reduced to sums or gradients, and dropped.

Plain torch for every device; Triton kernels for 16-bit features on CUDA.
"""

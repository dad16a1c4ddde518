"""Tiles of the score matrix: each is computed, reduced to sums or gradients, and dropped.

Plain torch for every device; Triton kernels for features of up to 32 bits on CUDA. Inside ``losses`` it
imports no other package.
"""

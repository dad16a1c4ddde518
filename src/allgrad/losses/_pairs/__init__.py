"""Losses of pairs, CLIP, SigLIP and InfoNCE: from the arguments to value, gradients and second derivatives.

Inside ``losses`` it imports ``_arguments`` and ``_tiles``.
"""

"""Communication: the only package that uses ``torch.distributed``.

Plain tensors in, plain tensors out, no gradients. Imports ``_core`` and ``errors``.
"""

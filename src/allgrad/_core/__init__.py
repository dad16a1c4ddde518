"""Plain facts: sizes by rank, reductions, the queue of calls, private names of torch.

No communication. Imports ``errors``.
"""

"""What each rank gives to a loss: checked, and compared by all ranks in one small message or with the keys.

Inside ``losses`` it imports ``_tiles``.
"""

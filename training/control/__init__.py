"""Control of single steps: whether one is taken, and whether the Gram penalty is active in it.

The mathematics of the penalty is in spectral/gram_penalty.py. Start with guard.py.
"""

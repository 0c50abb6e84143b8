"""What decides whether a step is taken, and whether the Gram penalty acts in it.

The penalty's mathematics is in spectral/gram_penalty.py. Start with guard.py.
"""

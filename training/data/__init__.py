"""Training and validation tokens: their files, manifest, and the order of samples.

Nothing here knows the model or the layout, beyond a data-parallel rank and size; scripts/data turns
text into tokens. Start with order.py.
"""

"""Training and validation tokens: their files, manifest, and the order of samples.

Nothing here knows the model or the layout, beyond the place of a rank in it; scripts/data turns
text into tokens. Start with build_data.py and order.py.
"""

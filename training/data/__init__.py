"""Training and validation tokens: their files, manifest, and the order of samples.

Nothing here depends on the model, or on the layout beyond a rank's position; scripts/data turns
text into tokens. Start with build_data.py and order.py.
"""

"""Training and validation tokens: files, manifest and sample order.

The samples do not depend on the model or the layout; a rank's position only determines which
samples the rank reads. Text is tokenized in scripts/data. Start with build_data.py and order.py.
"""

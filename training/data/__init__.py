"""Training and validation tokens: files, manifest and sample order.

This package is independent of the model and, apart from a rank's position, of the layout. Text is
tokenized in scripts/data. Start with build_data.py and order.py.
"""

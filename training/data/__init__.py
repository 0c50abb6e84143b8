"""Training and validation tokens: files, manifest and sample order.

This package does not depend on the model. All it uses of the layout is a rank's position. Text is
tokenized in scripts/data. Start with build_data.py and order.py.
"""

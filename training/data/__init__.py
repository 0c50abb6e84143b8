"""Training and validation tokens: files, manifest and sample order.

This package does not depend on the model or, except for a rank's position, on the layout.
scripts/data tokenizes text. Start with build_data.py and order.py.
"""

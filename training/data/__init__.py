"""Training and validation tokens: files, manifest and sample order.

This package depends neither on the model nor on the layout, except for a rank's position;
scripts/data tokenizes text. Start with build_data.py and order.py.
"""

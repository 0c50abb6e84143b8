"""Training and validation tokens: files, their manifest, and the order in which samples are read.

No model and no rank's share of a batch beyond its number is known here; text becomes tokens in
scripts/data. Start with order.py.
"""

"""Training and validation tokens: files, manifest and sample order.

Apart from the vocabulary size, the samples do not depend on the model, nor do they depend on the
layout: a rank's position only determines which samples the rank reads. Text is tokenized in
scripts/data. Start with build_data.py and order.py.
"""

"""Training and validation tokens: files, manifest and sample order.

The samples do not depend on the layout: a rank's position only determines which samples the rank
reads. The samples depend on the model only through the vocabulary size. Text is tokenized in
scripts/data. Read build_data.py and order.py first.
"""

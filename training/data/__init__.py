"""Training and validation tokens: files, manifest and sample order.

The samples do not depend on the layout: a rank's position only determines which samples it reads.
They do not depend on the model either, apart from its vocabulary size. Text is tokenized in
scripts/data. Start with build_data.py and order.py.
"""

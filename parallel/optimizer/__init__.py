"""The distributed optimizer: which rank owns which matrix, the exchange of what is cut, the step.

The mathematics of a rule is in spectral/rules, not here. Start with optimizer.py, then
domain_optimizer.py and exchange.py.
"""

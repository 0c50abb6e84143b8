"""The figures that scripts/plot.py draws."""

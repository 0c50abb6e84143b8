"""The figures that scripts/plot.py draws, a file each."""

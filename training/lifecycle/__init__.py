"""What goes on beside the steps: stopping when asked, signs of life, pace, the run folder.

No tensor of the model is touched here. Start with lifecycle.py.
"""

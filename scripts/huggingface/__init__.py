"""Checkpoints to Hugging Face and back: what scripts/convert_hf.py is made of."""

"""Command-line tools. They may import every package; no package imports them."""

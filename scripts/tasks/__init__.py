"""Parts of scripts/prepare_task.py: rows of public data sets, and the examples that they become."""

"""Checkpoints on disk: saving, verifying and resuming from them.

parallel/checkpoint/ writes the tensors of all ranks. Start with checkpoints.py, then resume.py.
"""

from typing import Final

COMPLETE: Final = "COMPLETE"
"""Last file of a checkpoint. Importing it from here loads neither torch nor megatron-core."""

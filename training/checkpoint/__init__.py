"""Checkpoints on disk: saving, verifying and resuming from them.

parallel/checkpoint/ writes the tensors of all ranks. Read checkpoints.py first, then resume.py.
"""

from typing import Final

COMPLETE: Final = "COMPLETE"
"""Name of the last file of a checkpoint. Importing this constant loads neither torch nor
megatron-core."""

"""What is trained: model families built from megatron-core blocks, and their units."""

"""Modules that our layer specs swap into Megatron's transformer layer."""

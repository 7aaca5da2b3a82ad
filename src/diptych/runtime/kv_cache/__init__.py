"""The memory of the KV cache: its size for a checkpoint, its tensors, and the pool that workers of a host share."""

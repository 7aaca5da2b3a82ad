"""Who holds which block of the KV cache."""

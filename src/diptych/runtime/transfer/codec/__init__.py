"""What KV is packed with on a wire."""

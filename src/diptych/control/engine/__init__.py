"""One worker's decisions: what runs in its next step, and which blocks of the KV cache hold what."""

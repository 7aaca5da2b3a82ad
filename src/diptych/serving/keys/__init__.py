"""API keys by name: who asks, what they may do, and what they used."""

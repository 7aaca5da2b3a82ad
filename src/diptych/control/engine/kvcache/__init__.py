"""Which blocks hold which tokens: allocation, prefix reuse, tiers."""

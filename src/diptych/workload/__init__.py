"""Who arrives when with what: arrival processes, length distributions, prefix sharing and traces."""

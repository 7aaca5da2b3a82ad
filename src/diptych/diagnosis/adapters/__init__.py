"""One file an engine: what it exports becomes an Observation."""

"""Moving KV between host memory and disk: the format of extents, segments in a folder, the store, its threads."""

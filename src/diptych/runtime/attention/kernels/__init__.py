"""Native code (C++): attention, matrix products, packing of weights, the KV codec, and whole decode steps. Built when a
compiler is at hand; everything works without it, slower."""

"""Native code (C++), built when a compiler is at hand; everything works without it, slower."""

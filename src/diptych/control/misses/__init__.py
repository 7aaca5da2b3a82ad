"""Why a prompt was computed although a cache could have held it."""

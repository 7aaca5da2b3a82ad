"""Which requests are let in, and which goes next."""

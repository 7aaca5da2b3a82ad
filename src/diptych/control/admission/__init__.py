"""Who is let in, and who goes next."""

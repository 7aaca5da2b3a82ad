"""What people look at: the live page, the guide and the comparison. Never imports serving or runtime."""

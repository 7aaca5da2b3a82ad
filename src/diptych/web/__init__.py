"""The pages: live page, guide and comparison. Never imports serving or runtime."""

"""The fleet's decisions: a request's way across workers, failures included."""

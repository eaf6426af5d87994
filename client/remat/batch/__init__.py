"""The largest batch that trains inside a budget, and batches of varying length in a few sizes."""

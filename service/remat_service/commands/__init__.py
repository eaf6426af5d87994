"""What operators run: tenants, keys and the store."""

"""From a verified plan to functions that run it."""

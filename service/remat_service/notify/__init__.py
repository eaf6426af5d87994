"""Waking whoever waits for a change, in this process and in others on the same database."""

"""What callers ask for, without HTTP: read, answered from the store or queued, looked up, ended."""

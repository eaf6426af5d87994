"""What users call, and the module that trains by its plans."""

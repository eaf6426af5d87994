"""Callbacks for the tools that training jobs are written with; each imports its own tool, and only when it is used."""

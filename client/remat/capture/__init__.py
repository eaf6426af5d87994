"""From a module and one call of it to the graph of its training step: ops, values, and who reads what."""

"""Chains with a link to the host: what to keep, recompute or move, first in the fluid model, then tensor by tensor."""

"""Plans behind `torch.compile`: with torch's own kernels (`eager`) or with those of Inductor (`inductor`)."""

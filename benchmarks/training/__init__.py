"""Training by plans compared with what a job would use in their place: time, peak, gradients."""

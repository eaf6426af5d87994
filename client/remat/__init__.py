"""Train inside a memory budget: capture a torch model's training step, have it planned, run it by the plan."""

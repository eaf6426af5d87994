"""A pipeline's stages planned together: what each rank holds by the schedule's actions, the least makespan."""

"""Plans that torch carries out by tags: on whole models, under Inductor, and on graphs alone."""

"""Join networks in memory slots: the optimal dynamic program, its schedules, and the equivalent chain as a baseline."""

"""Who is asked for a plan, what is remembered, and how each answer is checked; no module in here needs torch."""

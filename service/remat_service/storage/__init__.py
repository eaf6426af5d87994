"""What is kept: tables and their history, plans and proofs under salted keys, what is remembered of them in memory."""

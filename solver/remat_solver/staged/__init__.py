"""Proofs by stages: a relaxation with few coarse stages, refined where its solution breaks the memory."""

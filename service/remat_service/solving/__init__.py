"""From a queued solve to its answer: who takes it, in which process, and what is written down on the way."""

"""What is known about a problem, and the answer that follows from it: pure, without threads, clocks or databases."""

from .budgets import Knowledge
from .known import Bound, Ending, Known
from .sentences import claim_sentence, sentence

__all__ = ["Bound", "Ending", "Knowledge", "Known", "claim_sentence", "sentence"]

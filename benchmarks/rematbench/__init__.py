"""RematBench: public graphs with budgets, methods next to each other on them, and a checker that stands alone."""


class Unanswered(Exception):
    """Why a method gives no plan."""

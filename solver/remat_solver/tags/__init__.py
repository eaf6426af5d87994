"""The plans that torch carries out by itself (`remat_ir.tags`): their exact cost and peak, and a search over them."""

from .search import TagSearch

__all__ = ["TagSearch"]

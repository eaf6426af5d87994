"""The plans that torch carries out by itself (`remat_ir.tags`): cost and peak, a search, a staged program."""

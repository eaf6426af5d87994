"""Graphs and chains with a link to the host: what to keep, recompute or move; of graphs, a bound on every makespan."""

"""Plans that torch's own partitioner carries out: tags on a joint graph's nodes, checkpoints' policies, flags."""

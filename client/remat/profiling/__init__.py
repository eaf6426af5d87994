"""What a step costs: time and workspace of each kernel, the bytes that are there throughout, the peak of a real run."""

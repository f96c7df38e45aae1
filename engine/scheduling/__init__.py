"""What each step computes. Plain data: no tensors, no transport."""

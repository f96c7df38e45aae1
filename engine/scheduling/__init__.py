"""Plans of steps: which requests compute which tokens, on which pages. Plain data: no tensors, no transport."""
